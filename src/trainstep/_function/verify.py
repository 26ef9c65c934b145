"""`Function.verify`: the exact program against the one for sizes that vary, on one batch.

Both compute the batch from the same state, the second with the padding filled with NaN and then
with large noise. Compared are what the step returns, every gradient that it takes, and what it
writes besides the weights: an optimizer like Adam makes a full step of the rounding of a gradient
that is zero, so weights would differ where nothing is wrong.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from trainstep._common.structure import structure
from trainstep._engines.shared.padding import FILLINGS, filling
from trainstep._function.inside.gradients import listening

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Verification:
    """How far the program for sizes that vary is from the exact one.

    Attributes:
        refused: Why the step cannot be recorded for sizes that vary; "" if it can.
        differences: The largest difference of each part, relative to the largest gradient for
            gradients, to the largest value for others, and to 1 if that is more.
        tolerance: What is taken as rounding.
    """

    refused: str
    differences: dict[str, float]
    tolerance: float

    @property
    def exact(self) -> bool:
        """Whether every call gives the numbers of its exact shapes. So it does if refused."""
        return all(value <= self.tolerance for value in self.differences.values())

    def __bool__(self) -> bool:
        return self.exact

    def __str__(self) -> str:
        if self.refused:
            return f"runs at exact shapes: {self.refused}"
        if not self.differences:
            return "exact: nothing is returned or written"
        worst = max(self.differences, key=lambda part: self.differences[part])
        verdict = "exact" if self.exact else "NOT exact"
        lines = [f"{verdict}: at most {self.differences[worst]:.1e}, in {worst}"]
        lines += [f"  {value:.1e}  {part}" for part, value in self.differences.items()]
        return "\n".join(lines)


def probed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same step, which also returns the gradients that it takes."""

    @functools.wraps(fn)
    def step(*args: Any, **kwargs: Any) -> Any:
        with listening() as taken:
            returned = fn(*args, **kwargs)
        return {"returned": returned, "gradient": [each.gradients for each in taken.here]}

    return step


def compared(
    exact: Any,
    varying: Any,
    call: tuple[Any, Any],
    written: Sequence[Any],
    same_draws: Callable[[], AbstractContextManager[Any]],
) -> dict[str, float]:
    """The differences between two functions on one call, by part.

    Args:
        exact: The function whose numbers are right.
        varying: The other one.
        call: Arguments by position and by name.
        written: The variables that the step writes.
        same_draws: Makes blocks in which random draws are the same.
    """
    args, kwargs = call
    found: dict[str, float] = {}
    with _unchanged(written), same_draws():
        wanted = _numbers(exact(*args, **kwargs), written)
    gradients = [np.abs(v).max() for part, v in wanted.items() if part.startswith("gradient")]
    scale = max([1e-6, *(g for g in gradients if np.isfinite(g))])
    for fill in FILLINGS:  # no padding, nothing to fill, on an engine without buckets
        with _unchanged(written), same_draws(), filling(fill):
            came = _numbers(varying(*args, **kwargs), written)
        for part, value in wanted.items():
            unit = scale if part.startswith("gradient") else max(1.0, _largest(value))
            difference = _difference(value, came[part]) / unit
            found[part] = max(found.get(part, 0.0), difference)
    return found


@contextlib.contextmanager
def _unchanged(variables: Sequence[Any]) -> Iterator[None]:
    before = [np.array(ops.convert_to_numpy(v.value)) for v in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)


def _numbers(result: Any, written: Sequence[Any]) -> dict[str, Any]:
    parts = dict(_leaves("", result))
    for variable in written:
        if not variable.trainable:
            parts[f"variable {variable.path}"] = variable.value
    return {part: np.array(ops.convert_to_numpy(value)) for part, value in parts.items()}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    children = structure(value)
    if children is None:
        if keras.ops.is_tensor(value) or isinstance(value, (np.ndarray, np.generic)):
            yield name, value
        return
    for suffix, child in children:
        label = suffix[2:-2] if not name else f"{name}{suffix}"
        yield from _leaves(label, child)


def _largest(value: Any) -> float:
    finite = np.abs(value[np.isfinite(value)]) if value.dtype.kind in "fc" else np.abs(value)
    return float(finite.max()) if finite.size else 0.0


def _difference(wanted: Any, came: Any) -> float:
    """The largest difference; infinite where shapes or what is not finite differ."""
    if wanted.shape != came.shape:
        return float("inf")
    if not wanted.size:
        return 0.0
    wanted, came = wanted.astype("float64"), came.astype("float64")
    same = (wanted == came) | (np.isnan(wanted) & np.isnan(came))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(wanted - came))
    return float(np.nan_to_num(difference, nan=np.inf).max())
