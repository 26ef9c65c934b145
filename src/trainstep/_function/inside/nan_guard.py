"""The NaN guard: a batch whose loss or gradients are not finite updates no variable (`nan_policy`).

    step --in a scope of its own--> new values, losses, gradients
         --all finite?--> ok: one boolean, computed on the device
         --where(ok, new, old)--> every variable that the step writes; the number of skipped batches

All of this is part of the program, so the host reads nothing. With `nan_policy="raise"` the program
also stores its findings, the names of the values that are not finite, in a variable of a fixed
size: like other state, it can leave differentiations and branches. The outermost step returns it as
an output and clears it; the host checks it when the call returns.
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
from trainstep._function.inside.gradients import Differentiation, GradientListener, listening
from trainstep._state.locks import locked
from trainstep._state.outputs import CheckedOutput
from trainstep._state.scopes import Branch, current_scope, no_scope, recording, run_isolated

_local = threading.local()
_SHOWN = 4  # the largest number of parts that a message names
_SMALL = 2**17  # elements; smaller gradients are concatenated and checked together
_FLOATS = ("bfloat16", "float16", "float32", "float64")


class Part(NamedTuple):
    """A value that has to be finite."""

    kind: str  # "loss", "gradient" or "new value"
    name: str
    finite: Any  # a boolean tensor
    value: Any = 0.0  # of a loss, for the message


class Unguarded:
    """The guard of a function without a `nan_policy`: it does nothing."""

    def wrap(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function unchanged."""
        return fn

    def skipped(self) -> int:
        """Returns 0."""
        return 0


class Guard:
    """Makes the programs of one function skip bad batches, and counts them.

    Args:
        name: The name of the function, for messages.
        raises: Whether a bad batch is an error.
    """

    def __init__(self, name: str, *, raises: bool) -> None:
        self._name = name
        self._count = keras.Variable(0, dtype="int32", trainable=False, name="skipped")
        self._findings = Findings(name, self._count) if raises else None

    def wrap(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function so that it updates no variable if a batch is bad."""

        @functools.wraps(fn, updated=())
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if recording() is None:
                raise _outside_of_a_step(self._name)

            def case() -> tuple[GradientListener, Any]:
                with listening() as listener:
                    return listener, fn(*args, **kwargs)

            branch, (listener, result) = run_isolated(case, as_step=True)
            parts = _parts(branch, listener, named=self._findings is not None)
            if parts:
                self._write_if_finite(branch, parts)
            else:  # the step has nothing that could be bad
                branch.give_back(branch.new_values())
            return result

        return guarded

    def skipped(self) -> int:
        """Returns the number of skipped batches."""
        with no_scope(), locked(self._count):
            return int(ops.convert_to_numpy(self._count.value))

    def _write_if_finite(self, branch: Branch, parts: list[Part]) -> None:
        """Writes the new values of a step if all parts of it are finite, else the old ones."""
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
    """Returns the guard for a policy."""
    return Unguarded() if policy is None else Guard(name, raises=policy == "raise")


def _parts(branch: Branch, listener: GradientListener, *, named: bool) -> list[Part]:
    """Returns the values of a step that have to be finite; with `named`, gradients one by one."""
    # With a loss-scaling optimizer, gradients may overflow: it then lowers its scale itself.
    scaled = any(variable.name == "dynamic_scale" for variable in branch.held.values())
    parts: list[Part] = []
    for number, each in enumerate(listener.found, start=1):
        name = "the loss" if number == 1 else f"loss {number}"
        parts.append(Part("loss", name, ops.isfinite(each.value), each.value))
        if not scaled:
            parts += _named(each, number) if named else _grouped(each)
    if listener.missed or not listener.found:
        parts += _new_values(branch)
    return parts


def _grouped(made: Differentiation) -> list[Part]:
    """Returns the gradients; small ones as one vector, to have fewer operations to dispatch."""
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
    """Returns the checks of written variables: an element that was finite has to stay finite."""
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


def _outside_of_a_step(function: str) -> ArgumentError:
    return ArgumentError(
        function,
        "nan_policy",
        "a call outside any trace, or inside a `trainstep.function`: it sees every variable update",
        "a call inside a `tf.function`, a `keras.StatelessScope` or another library's gradient",
        "decorate the outer function with `trainstep.function` instead",
    )


# Findings -----------------------------------------------------------------------------------


class Findings:
    """The values that were not finite in the bad batches of one function.

    Args:
        name: The name of the function, for messages.
        count: The variable that counts skipped batches.
    """

    def __init__(self, name: str, count: Any) -> None:
        self._name, self._count = name, count
        # [0]: the number of bad batches in this call. The rest is about the last of them: [1] the
        # number of bad parts that are no losses, [2] the first bad loss, [3:] the indices of the
        # first bad parts, inf where there is none.
        nothing = np.zeros(3 + _SHOWN, "float32")
        self._found = keras.Variable(nothing, dtype="float32", trainable=False, name="found")
        self._numbers: dict[tuple[str, str], int] = {}  # index of a part, by kind and name

    def note(self, parts: Sequence[Part], finite: Any, ok: Any) -> None:
        """Stores which parts are not finite, if any; traced as a part of the step."""
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
        collected = getattr(_local, "collected", None)
        if collected is not None:
            collected[id(self)] = self

    def add_check(self, result: Any) -> Any:
        """Returns the result of a step, with a check that runs on the host and may raise."""
        found = self._found.value
        self._found.assign(ops.zeros_like(found))
        return CheckedOutput(result, self._check, (found, self._count.value))

    def _check(self, result: Any, found: Any, count: Any) -> Any:
        steps = np.atleast_2d(ops.convert_to_numpy(found))  # one row per step of the call
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
    """Describes the values that are not finite."""
    texts = [f"{name} is {loss:g}" for kind, name in first if kind == "loss"][:1]
    names = [name for kind, name in first if kind != "loss"]
    if names:
        more = f" and {many - len(names)} more" if many > len(names) else ""
        by = "gradients by" if any(kind == "gradient" for kind, _ in first) else "new values of"
        texts.append(f"the {by} {', '.join(names)}{more} are not finite")
    return "; ".join(texts)


@contextlib.contextmanager
def collecting_findings() -> Iterator[dict[int, Findings]]:
    """Yields a dict of all `Findings` that a step, and the steps that it calls, may store."""
    before = getattr(_local, "collected", None)
    collected: dict[int, Findings] = {}
    _local.collected = collected
    try:
        yield collected
    finally:
        _local.collected = before


def add_checks(result: Any, collected: dict[int, Findings]) -> Any:
    """Returns the result of a step with the checks of all findings."""
    for findings in collected.values():
        result = findings.add_check(result)
    return result
