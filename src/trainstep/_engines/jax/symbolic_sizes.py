"""JAX: records a step with symbols for dynamic sizes, and the assumptions about them.

JAX traces with symbolic sizes, and decides comparisons that hold for every size. Others raise
(`n > 8`) or, for `==`, silently return False. During our traces they return the result for the
sizes of the current call (`==` still False), and are recorded as assumptions: the record does not
serve sizes for which a comparison has another result.
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

from trainstep._common import user_code
from trainstep._engines.contract import Axes, Refused, Sizes
from trainstep._engines.jax import private
from trainstep._engines.jax.masking.bucket import is_dynamic, value_of
from trainstep._engines.shared.patching import replaced

shape_poly = private.shape_poly
# Comparisons in these parts of JAX concern broadcasting, caches and empty arrays; results do not
# depend on them for any size from 1 on.
_NEUTRAL = ("jax._src.core", "jax._src.tree_util", "jax._src.interpreters", "jax._src.lax")


class Comparison(NamedTuple):
    """A comparison of sizes, with its result during the trace."""

    left: Any
    relation: str  # == or >=
    right: Any
    answer: bool
    site: str  # the line in parentheses, if user code compared

    def holds(self, sizes: Sizes) -> bool:
        """Whether the comparison has the same result for these sizes."""
        difference = int(value_of(self.left, sizes)) - int(value_of(self.right, sizes))
        return (difference == 0 if self.relation == "==" else difference >= 0) is self.answer

    def __str__(self) -> str:
        left, right = self.left, self.right
        if self.relation == "==":
            text = f"{left} {'==' if self.answer else '!='} {right}"
        elif is_dynamic(left):
            text = f"{left} {'>=' if self.answer else '<'} {right}"
        else:
            text = f"{right} {'<=' if self.answer else '>'} {left}"
        return text + self.site


class Assumptions:
    """The assumptions of a record about sizes."""

    def __init__(self, hint: Sizes) -> None:
        self._hint = hint
        self._comparisons: dict[Comparison, None] = {}

    def violated_assumption(self, sizes: Sizes) -> str:
        """Returns the first assumption that these sizes violate; "" if there is none."""
        return next((str(c) for c in self._comparisons if not c.holds(sizes)), "")

    def not_equal(self, left: Any, right: Any) -> None:
        """Records that two sizes were treated as different."""
        frame = _comparer()
        name = str(frame.f_globals.get("__name__", ""))
        # A lookup in one of JAX's caches compares sizes as dict keys; that assumes nothing.
        is_lookup = name.startswith("jax") and not _compares(frame)
        if not name.startswith(_NEUTRAL) and not is_lookup:
            self._comparisons[
                Comparison(
                    left, "==", right if is_dynamic(right) else int(right), False, _line_of(frame)
                )
            ] = None

    def is_zero(self, size: Any) -> bool:
        """Whether a size is zero in the current call."""
        answer = int(value_of(size, self._hint)) == 0
        self._comparisons[Comparison(size, "==", 0, answer, _line_of(_comparer()))] = None
        return answer

    def at_least(self, left: Any, right: Any) -> bool:
        """Whether one size is at least the other in the current call."""
        answer = bool(value_of(left, self._hint) >= value_of(right, self._hint))
        self._comparisons[Comparison(left, ">=", right, answer, _line_of(_comparer()))] = None
        return answer


def _comparer() -> FrameType:
    """Returns the innermost frame outside of this file and of JAX's `shape_poly`."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__") in (__name__, shape_poly.__name__) and frame.f_back:
        frame = frame.f_back
    return frame


def _compares(frame: FrameType) -> bool:
    """Whether a frame executes a comparison instruction; on a Python without these, it may."""
    return len(_COMPARING) < 2 or frame.f_code.co_code[frame.f_lasti] in _COMPARING


_COMPARING = {dis.opmap[name] for name in ("COMPARE_OP", "CONTAINS_OP") if name in dis.opmap}


def _line_of(frame: FrameType) -> str:
    """Returns the line in parentheses, if the frame is user code and not a library."""
    return f" ({user_code.here()})" if user_code.is_outside(frame) else ""


# What a shape is read from.
_SHAPED = (
    (jax.core.Tracer, jax.core.ShapedArray, jax.ShapeDtypeStruct)
    if sys.version_info >= (3, 14)
    else ()
)
_local = threading.local()


@contextlib.contextmanager
def assuming(assumptions: Assumptions) -> Iterator[None]:
    """Decides and records comparisons that JAX cannot decide, in this thread and block."""
    expression = shape_poly._DimExpr
    _local.assumptions = assumptions
    try:
        with replaced(
            [
                (expression, "__eq__", _recording_equal),
                (expression, "__bool__", _recording_zero),
                (expression, "__hash__", _refusing_lookup),
                *((owner, "shape", _new_tuple) for owner in _SHAPED),
                (expression, "__str__", _refusing_text),
                (expression, "__repr__", _refusing_text),
                (expression, "max", _recording_larger),
                (expression, "rmax", _recording_larger),
                (expression, "min", _recording_smaller),
                (expression, "rmin", _recording_smaller),
                (shape_poly, "_geq_decision", _recording_at_least),
            ]
        ):
            yield
    finally:
        _local.assumptions = None


def _active() -> Assumptions | None:
    """Returns the assumptions of this thread's trace; other threads are not affected."""
    return getattr(_local, "assumptions", None)


def _recording_equal(original: Any) -> Any:
    def equal(self: Any, other: Any) -> bool:
        answer = bool(original(self, other))
        assumptions = _active()
        if assumptions is not None and isinstance(other, np.ndarray):
            raise Refused("Python compares a dynamic size with an array")
        if assumptions is not None and not answer and _comparable(self, other):
            assumptions.not_equal(self, other)
        return answer

    return equal


def _recording_zero(original: Any) -> Any:
    def is_true(self: Any) -> bool:
        assumptions = _active()
        # Outside of our traces: true, as in a class without `__bool__`.
        return True if assumptions is None else not assumptions.is_zero(self)

    return is_true


def _refusing_lookup(original: Any) -> Any:
    """Refuses lookups of a size by user code: the symbol is not equal to any number."""

    def looked_up(self: Any) -> Any:
        if _active() is not None and user_code.is_outside(sys._getframe(1)):
            raise Refused("Python looks up a dynamic size in a dict or set")
        return original(self)

    return looked_up


def _new_tuple(original: Any) -> Any:
    """Returns a shape that has no hash yet.

    Since Python 3.14 a tuple remembers its hash: the lookup of a shape that JAX has looked up
    before would not ask its sizes for theirs, and find nothing in silence.
    """

    def shape(self: Any) -> Any:
        found = original.__get__(self)
        return found if _active() is None else (*found,)

    return property(shape, original.__set__)


def _refusing_text(original: Any) -> Any:
    """Refuses the text of a size in user code, unless it is only printed or logged."""

    def text(self: Any) -> Any:
        users = _active() is not None and user_code.is_outside(sys._getframe(1))
        if users and not user_code.is_shown():
            raise Refused("Python uses the text of a dynamic size")
        return original(self)

    return text


def _recording_at_least(original: Any) -> Any:
    def at_least(left: Any, right: Any, text: Callable[[], str]) -> bool:
        try:
            return bool(original(left, right, text))
        except shape_poly.InconclusiveDimensionOperation:
            assumptions = _active()
            if assumptions is None:
                raise
            return assumptions.at_least(left, right)

    return at_least


# JAX can infer little about `max(t - 2, 0)`, so we assume one side and continue with `t - 2`.
def _recording_larger(original: Any) -> Any:
    def larger(self: Any, other: Any) -> Any:
        return original(self, other) if _active() is None else self if self >= other else other

    return larger


def _recording_smaller(original: Any) -> Any:
    def smaller(self: Any, other: Any) -> Any:
        return original(self, other) if _active() is None else other if self >= other else self

    return smaller


def _comparable(left: Any, right: Any) -> bool:
    """Whether two sizes may be equal for some values of the symbols."""
    if isinstance(right, shape_poly._DimExpr):
        return left.scope is right.scope and is_dynamic(left - right)
    return isinstance(right, (int, np.integer)) or (
        isinstance(right, (float, np.floating)) and float(right).is_integer()
    )


def symbolic(leaves: Sequence[Any], axes: Axes) -> tuple[list[Any], dict[str, int]]:
    """Returns stand-ins with symbolic shapes for the arrays of a call, and the actual sizes."""
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
    """Returns the dynamic sizes of these arrays, by name."""
    return {
        name: int(size)
        for leaf, labels in zip(leaves, axes, strict=True)
        for size, name in zip(leaf.shape, labels, strict=True)
        if name is not None
    }


def true_shape(shape: Sequence[Any], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns a symbolic shape, evaluated for these sizes."""
    return tuple(int(value_of(dim, sizes)) for dim in shape)


def needs_concrete_size(error: BaseException) -> bool:
    """Whether an error, or one that caused it, reports that a symbol was used as a number."""
    found: BaseException | None = error
    while found is not None:
        if any(word in str(found) for word in ("_DimExpr", "ymbolic dimension")):
            return True
        found = found.__cause__ or found.__context__
    return False
