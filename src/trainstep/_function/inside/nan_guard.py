"""Guards: a batch whose loss or gradients are not finite changes nothing (`nan_policy`).

    step --in a scope of its own--> new values, losses, gradients
         --all finite?--> ok: one boolean, computed on the device
         --where(ok, new, old)--> every variable that the step writes; the count of what was skipped

All of it is part of the program, so the host reads nothing. With `nan_policy="raise"` the program
also returns what was not finite, and the host looks at that (`_findings`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from trainstep._common.errors import ArgumentError, NonFiniteError
from trainstep._common.structure import structure
from trainstep._function.inside.gradients import Differentiation, Taken, listening
from trainstep._state.locks import locked
from trainstep._state.outputs import CheckedOutput
from trainstep._state.scopes import Branch, current_scope, no_scope, recording, run_isolated

_local = threading.local()
_SHOWN = 4  # parts that a message may name
_SMALL = 2**17  # elements of a gradient that is copied to be looked at with others
_FLOATS = ("bfloat16", "float16", "float32", "float64")


class Part(NamedTuple):
    """Something that has to be finite."""

    kind: str  # "loss", "gradient" or "new value"
    name: str
    finite: Any  # a boolean tensor
    value: Any = 0.0  # of a loss


class Unguarded:
    """What stands in the place of a guard where there is none."""

    def around(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function as it is."""
        return fn

    def skipped(self) -> int:
        """None."""
        return 0


class Guard:
    """What the programs of one function have in common to skip bad batches.

    Args:
        name: What messages call the function.
        raises: Whether a bad batch is an error.
    """

    def __init__(self, name: str, *, raises: bool) -> None:
        self._name = name
        self._count = keras.Variable(0, dtype="int32", trainable=False, name="skipped")
        self._findings = Findings(name, self._count) if raises else None

    def around(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A function that does what `fn` does, or changes nothing."""

        @functools.wraps(fn, updated=())
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if recording() is None:
                raise _nowhere_to_stand(self._name)

            def case() -> tuple[Taken, Any]:
                with listening() as taken:
                    return taken, fn(*args, **kwargs)

            branch, (taken, result) = run_isolated(case, as_step=True)
            parts = _parts(branch, taken, named=self._findings is not None)
            if parts:
                self._let_out(branch, parts)
            else:  # nothing in it could be bad
                branch.give_back(branch.new_values())
            return result

        return guarded

    def skipped(self) -> int:
        """How many batches were."""
        with no_scope(), locked(self._count):
            return int(ops.convert_to_numpy(self._count.value))

    def _let_out(self, branch: Branch, parts: list[Part]) -> None:
        """Lets the writes of a step out if all parts of it are finite."""
        finite = ops.stack([part.finite for part in parts])
        ok = ops.all(finite)
        for key, variable in branch.writes.items():
            old, new = branch.outer_value(variable), branch.state_mapping[key]
            if new is not old:
                current_scope().add_update((variable, ops.where(ok, new, old)))
        self._count.assign(self._count.value + ops.cast(ops.logical_not(ok), "int32"))
        if self._findings is not None:
            self._findings.note(parts, finite, ok)


def guard(name: str, policy: str | None) -> Guard | Unguarded:
    """The guard of a function."""
    return Unguarded() if policy is None else Guard(name, raises=policy == "raise")


def _parts(branch: Branch, taken: Taken, *, named: bool) -> list[Part]:
    """What has to be finite in a step; gradients one by one if they are to be named."""
    # An optimizer that scales the loss lets gradients overflow, and lowers its scale when they do.
    scaled = any(variable.name == "dynamic_scale" for variable in branch.held.values())
    parts: list[Part] = []
    for number, each in enumerate(taken.here, start=1):
        name = "the loss" if number == 1 else f"loss {number}"
        parts.append(Part("loss", name, ops.isfinite(each.value), each.value))
        if not scaled:
            parts += _named(each, number) if named else _together(each)
    if taken.elsewhere or not taken.here:
        parts += _new_values(branch)
    return parts


def _together(made: Differentiation) -> list[Part]:
    """The gradients, small ones as one vector: an operation costs more than what is in it."""
    vectors: dict[str, list[Any]] = {}
    alone = []
    for _, gradient in _leaves(made.gradients, ""):
        shape = tuple(gradient.shape)
        if all(type(size) is int for size in shape) and math.prod(shape) <= _SMALL:
            dtype = keras.backend.standardize_dtype(gradient.dtype)
            vectors.setdefault(dtype, []).append(ops.reshape(gradient, (-1,)))
        else:
            alone.append(gradient)
    alone += [ops.concatenate(each) if len(each) > 1 else each[0] for each in vectors.values()]
    return [Part("gradient", "", ops.all(ops.isfinite(gradient))) for gradient in alone]


def _named(made: Differentiation, number: int) -> list[Part]:
    leaves = _leaves(made.gradients, f"argument of loss {number}")
    names = [name for name, _ in leaves]
    if made.variables is not None:
        names = [variable.path for variable in made.variables]
    return [
        Part("gradient", name, ops.all(ops.isfinite(gradient)))
        for name, (_, gradient) in zip(names, leaves, strict=True)
    ]


def _new_values(branch: Branch) -> list[Part]:
    """What a step writes has to be finite where it was so before."""
    parts = []
    for key, variable in branch.writes.items():
        if variable.dtype in _FLOATS:
            old, new = branch.outer_value(variable), branch.state_mapping[key]
            kept = ops.logical_or(ops.isfinite(new), ops.logical_not(ops.isfinite(old)))
            parts.append(Part("new value", variable.path, ops.all(kept)))
    return parts


def _leaves(value: Any, name: str) -> list[tuple[str, Any]]:
    children = structure(value)
    if children is None:
        return [(name, value)]
    return [leaf for suffix, child in children for leaf in _leaves(child, f"{name}{suffix}")]


def _nowhere_to_stand(function: str) -> ArgumentError:
    return ArgumentError(
        function,
        "nan_policy",
        "a call by itself, or inside a `trainstep.function`, where all that is written is seen",
        "a call inside a `tf.function`, a `keras.StatelessScope` or a plain differentiation",
        "decorate the outer function with `trainstep.function` instead",
    )


# Findings -----------------------------------------------------------------------------------


class Findings:
    """What the bad batches of one function had that was not finite.

    Args:
        name: What messages call the function.
        count: The variable that counts them.
    """

    def __init__(self, name: str, count: Any) -> None:
        self._name, self._count = name, count
        # How many batches of this call were bad; of the last one, how many parts besides losses
        # and the first bad loss; then the numbers of its first bad parts.
        nothing = np.zeros(3 + _SHOWN, "float32")
        self._found = keras.Variable(nothing, dtype="float32", trainable=False, name="found")
        self._numbers: dict[tuple[str, str], int] = {}  # of parts, by kind and name

    def note(self, parts: Sequence[Part], finite: Any, ok: Any) -> None:
        """Writes down which parts are not finite, unless all are, inside a step."""
        known = self._numbers
        numbers = [known.setdefault((part.kind, part.name), len(known)) for part in parts]
        loss = many = ops.zeros((), "float32")
        for part in reversed(parts):
            if part.kind == "loss":
                loss = ops.where(part.finite, loss, ops.cast(part.value, "float32"))
            else:
                many = many + ops.cast(ops.logical_not(part.finite), "float32")
        behind = np.full(_SHOWN, np.inf, "float32")
        bad = ops.where(finite, np.float32(np.inf), np.array(numbers, "float32"))
        first = ops.sort(ops.concatenate([bad, behind]))[:_SHOWN]
        before = self._found.value
        found = ops.concatenate([ops.stack([before[0] + 1.0, many, loss]), first])
        self._found.assign(ops.where(ok, before, found))
        heard = getattr(_local, "heard", None)
        if heard is not None:
            heard[id(self)] = self

    def judged(self, result: Any) -> Any:
        """A step's result, which the host hands out only if nothing was found."""
        found = self._found.value
        self._found.assign(ops.zeros_like(found))
        return CheckedOutput(result, self._judge, (found, self._count.value))

    def _judge(self, result: Any, found: Any, count: Any) -> Any:
        steps = np.atleast_2d(ops.convert_to_numpy(found))  # of one step, or of several in a call
        bad = np.flatnonzero(steps[:, 0])
        if not len(bad):
            return result
        _, many, loss, *numbers = steps[bad[0]]
        known = list(self._numbers)
        first = [known[int(number)] for number in numbers if np.isfinite(number)]
        which = f"batch {bad[0] + 1} of the {len(steps)} in this call" if len(steps) > 1 else ""
        raise NonFiniteError(
            self._name, _text(first, int(many), loss), which, int(ops.convert_to_numpy(count).max())
        )


def _text(first: Sequence[tuple[str, str]], many: int, loss: float) -> str:
    """What was not finite, in words."""
    texts = [f"{name} is {loss:g}" for kind, name in first if kind == "loss"][:1]
    names = [name for kind, name in first if kind != "loss"]
    if names:
        more = f" and {many - len(names)} more" if many > len(names) else ""
        by = "gradients by" if any(kind == "gradient" for kind, _ in first) else "new values of"
        texts.append(f"the {by} {', '.join(names)}{more} are not finite")
    return "; ".join(texts)


@contextlib.contextmanager
def hearing() -> Iterator[dict[int, Findings]]:
    """Gives the findings that a step, and what is called in it, may make."""
    before = getattr(_local, "heard", None)
    heard: dict[int, Findings] = {}
    _local.heard = heard
    try:
        yield heard
    finally:
        _local.heard = before


def judged(result: Any, heard: dict[int, Findings]) -> Any:
    """A step's result, with all that the host has to look at before."""
    for findings in heard.values():
        result = findings.judged(result)
    return result
