"""JAX: a step recorded with symbols for the sizes that vary, and what it took for granted.

JAX traces with symbolic sizes, and answers comparisons that hold for every size. Others it refuses
(`n > 8`) or, for `==`, answers with False in silence. While we trace, those are answered too, as
for the sizes of the call at hand, `==` with False, and noted: a call whose sizes would have been
answered otherwise is not served by this record.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export
from jax._src.export import shape_poly

from trainstep._common import user_code
from trainstep._engines.contract import Axes, Refused, Sizes
from trainstep._engines.jax.masking.bucket import value_of, varies
from trainstep._engines.shared.patching import replaced

# Comparisons in these parts of JAX are about broadcasting, caches and empty arrays; either answer
# gives the same numbers for every size from 1 on.
_NEUTRAL = ("jax._src.core", "jax._src.tree_util", "jax._src.interpreters", "jax._src.lax")


class Comparison(NamedTuple):
    """A question about sizes, as it was answered."""

    left: Any
    relation: str  # == or >=
    right: Any
    answer: bool
    site: str  # the user's line in parentheses, if it was the user who asked

    def holds(self, sizes: Sizes) -> bool:
        """Whether these sizes have the same answer."""
        difference = int(value_of(self.left, sizes)) - int(value_of(self.right, sizes))
        return (difference == 0 if self.relation == "==" else difference >= 0) is self.answer

    def __str__(self) -> str:
        left, right = self.left, self.right
        if self.relation == "==":
            said = f"{left} {'==' if self.answer else '!='} {right}"
        elif varies(left):
            said = f"{left} {'>=' if self.answer else '<'} {right}"
        else:
            said = f"{right} {'<=' if self.answer else '>'} {left}"
        return said + self.site


class Assumptions:
    """What a record takes for granted about sizes."""

    def __init__(self, hint: Sizes) -> None:
        self._hint = hint
        self._noted: dict[Comparison, None] = {}

    def violated_assumption(self, sizes: Sizes) -> str:
        """The first thing that is not so for these sizes; "" if all is."""
        return next((str(c) for c in self._noted if not c.holds(sizes)), "")

    def not_equal(self, left: Any, right: Any) -> None:
        """Notes that two sizes were taken as different."""
        asker = _asker()
        name = str(asker.f_globals.get("__name__", ""))
        # A cache of JAX's compares sizes when it looks for something; that is no question.
        by_chance = name.startswith("jax") and not _compares(asker)
        if not name.startswith(_NEUTRAL) and not by_chance:
            self._noted[
                Comparison(
                    left, "==", right if varies(right) else int(right), False, _line_of(asker)
                )
            ] = None

    def is_zero(self, size: Any) -> bool:
        """Whether a size is zero, for the sizes at hand."""
        answer = int(value_of(size, self._hint)) == 0
        self._noted[Comparison(size, "==", 0, answer, _line_of(_asker()))] = None
        return answer

    def at_least(self, left: Any, right: Any) -> bool:
        """Whether one is at least the other, for the sizes at hand."""
        answer = bool(value_of(left, self._hint) >= value_of(right, self._hint))
        self._noted[Comparison(left, ">=", right, answer, _line_of(_asker()))] = None
        return answer


def _asker() -> FrameType:
    """The innermost frame outside this file and JAX's own of sizes."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__") in (__name__, shape_poly.__name__) and frame.f_back:
        frame = frame.f_back
    return frame


def _compares(frame: FrameType) -> bool:
    """Whether a frame is at an instruction that compares."""
    return frame.f_code.co_code[frame.f_lasti] in _COMPARING


_COMPARING = {dis.opmap["COMPARE_OP"], dis.opmap["CONTAINS_OP"]}


def _line_of(asker: FrameType) -> str:
    """The user's line, if it was the user who asked, not a library for them."""
    return f" ({user_code.here()})" if user_code.is_outside(asker) else ""


_local = threading.local()


@contextlib.contextmanager
def assuming(assumptions: Assumptions) -> Iterator[None]:
    """Answers what JAX cannot about sizes, in this thread, until the trace is over."""
    expression = shape_poly._DimExpr
    _local.assumptions = assumptions
    try:
        with replaced(
            [
                (expression, "__eq__", _noting_equal),
                (expression, "__bool__", _noting_zero),
                (expression, "__hash__", _stopped),
                (expression, "__str__", _stopped_text),
                (expression, "__repr__", _stopped_text),
                (expression, "max", _noting_larger),
                (expression, "rmax", _noting_larger),
                (expression, "min", _noting_smaller),
                (expression, "rmin", _noting_smaller),
                (shape_poly, "_geq_decision", _noting_at_least),
            ]
        ):
            yield
    finally:
        _local.assumptions = None


def _noting() -> Assumptions | None:
    """What this thread notes; other threads are not to be disturbed."""
    return getattr(_local, "assumptions", None)


def _noting_equal(original: Any) -> Any:
    def equal(self: Any, other: Any) -> bool:
        answer = bool(original(self, other))
        noting = _noting()
        if noting is not None and isinstance(other, np.ndarray):
            raise Refused("Python compares a size that varies with an array")
        if noting is not None and not answer and _comparable(self, other):
            noting.not_equal(self, other)
        return answer

    return equal


def _noting_zero(original: Any) -> Any:
    def is_true(self: Any) -> bool:
        noting = _noting()
        return True if noting is None else not noting.is_zero(self)  # as without a `__bool__`

    return is_true


def _stopped(original: Any) -> Any:
    """Stops the user's own Python from looking a size up: the symbol is no number it knows."""

    def looked_up(self: Any) -> Any:
        if _noting() is not None and user_code.is_outside(sys._getframe(1)):
            raise Refused("Python looks a size that varies up in a dict or set")
        return original(self)

    return looked_up


def _stopped_text(original: Any) -> Any:
    """The same for its text, unless that is only shown."""

    def text(self: Any) -> Any:
        users = _noting() is not None and user_code.is_outside(sys._getframe(1))
        if users and not user_code.is_shown():
            raise Refused("Python uses the text of a size that varies")
        return original(self)

    return text


def _noting_at_least(original: Any) -> Any:
    def at_least(left: Any, right: Any, text: Callable[[], str]) -> bool:
        try:
            return bool(original(left, right, text))
        except shape_poly.InconclusiveDimensionOperation:
            noting = _noting()
            if noting is None:
                raise
            return noting.at_least(left, right)

    return at_least


# Where JAX would go on with `max(t - 2, 0)`, of which it knows little, we go on with `t - 2`.
def _noting_larger(original: Any) -> Any:
    def larger(self: Any, other: Any) -> Any:
        return original(self, other) if _noting() is None else self if self >= other else other

    return larger


def _noting_smaller(original: Any) -> Any:
    def smaller(self: Any, other: Any) -> Any:
        return original(self, other) if _noting() is None else other if self >= other else self

    return smaller


def _comparable(left: Any, right: Any) -> bool:
    """Whether two sizes may be equal for some values of the symbols."""
    if isinstance(right, shape_poly._DimExpr):
        return left.scope is right.scope and varies(left - right)
    return isinstance(right, (int, np.integer)) or (
        isinstance(right, (float, np.floating)) and float(right).is_integer()
    )


def symbolic(leaves: Sequence[Any], axes: Axes) -> tuple[list[Any], dict[str, int]]:
    """Stand-ins for the arrays of a call, with symbols, and the sizes that these have now."""
    names = sorted({name for labels in axes for name in labels if name is not None})
    symbols = dict(zip(names, export.symbolic_shape(", ".join(names)), strict=True))
    stand_ins = [
        jax.ShapeDtypeStruct(
            tuple(
                size if name is None else symbols[name]
                for size, name in zip(leaf.shape, labels, strict=True)
            ),
            leaf.dtype,
        )
        for leaf, labels in zip(leaves, axes, strict=True)
    ]
    return stand_ins, sizes_of(leaves, axes)


def sizes_of(leaves: Sequence[Any], axes: Axes) -> dict[str, int]:
    """The sizes that vary, as they are in these arrays."""
    return {
        name: int(size)
        for leaf, labels in zip(leaves, axes, strict=True)
        for size, name in zip(leaf.shape, labels, strict=True)
        if name is not None
    }


def true_shape(shape: Sequence[Any], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """A shape with symbols, for these sizes."""
    return tuple(int(value_of(dim, sizes)) for dim in shape)


def needs_a_number(error: BaseException) -> bool:
    """Whether an error, or one behind it, says that a symbol was used as a number."""
    found: BaseException | None = error
    while found is not None:
        if any(word in str(found) for word in ("_DimExpr", "ymbolic dimension")):
            return True
        found = found.__cause__ or found.__context__
    return False
