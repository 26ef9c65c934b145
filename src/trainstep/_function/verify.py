"""`Function.verify`: compares the exact program with the one for dynamic sizes, on one batch.

Both compute the batch from the same state, the second with padding of NaN and then of large noise.
The outputs, every gradient, and every written variable but the weights are compared. Weights are
not: an optimizer like Adam turns the rounding error of a zero gradient into a full step, so they
differ where nothing is wrong.
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
    """The differences between the program for dynamic sizes and the exact one.

    Attributes:
        refused: The reason why the step cannot be recorded with dynamic sizes; "" if it can.
        differences: The largest difference of each part: of a gradient, relative to the largest
            gradient; of another part, relative to its largest value, or to 1 if that is more.
        tolerance: The largest difference that counts as rounding.
    """

    refused: str
    differences: dict[str, float]
    tolerance: float

    @property
    def exact(self) -> bool:
        """Whether every call has the results of its exact shapes; also true if `refused`."""
        return all(value <= self.tolerance for value in self.differences.values())

    def __bool__(self) -> bool:
        return self.exact

    def __str__(self) -> str:
        if self.refused:
            return f"runs at exact shapes: {self.refused}"
        if not self.differences:
            return "exact: the step returns and writes nothing"
        worst = max(self.differences, key=lambda part: self.differences[part])
        verdict = "exact" if self.exact else "NOT exact"
        lines = [f"{verdict}: at most {self.differences[worst]:.1e}, in {worst}"]
        lines += [f"  {value:.1e}  {part}" for part, value in self.differences.items()]
        return "\n".join(lines)


def probed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a step so that it also returns the gradients that it computes."""

    @functools.wraps(fn)
    def step(*args: Any, **kwargs: Any) -> Any:
        with listening() as listener:
            returned = fn(*args, **kwargs)
        return {"returned": returned, "gradient": [each.gradients for each in listener.found]}

    return step


def compared(
    exact: Any,
    dynamic: Any,
    call: tuple[Any, Any],
    written: Sequence[Any],
    same_rng: Callable[[], AbstractContextManager[Any]],
) -> dict[str, float]:
    """Returns the differences between two functions on one call, by part.

    Args:
        exact: The function with exact shapes, the reference.
        dynamic: The function with dynamic sizes.
        call: Positional and keyword arguments.
        written: The variables that the step writes.
        same_rng: Returns a context in which the RNG state is fixed.
    """
    args, kwargs = call
    found: dict[str, float] = {}
    with _unchanged(written), same_rng():
        wanted = _numbers(exact(*args, **kwargs), written)
    gradients = [np.abs(v).max() for part, v in wanted.items() if part.startswith("gradient")]
    scale = max([1e-6, *(g for g in gradients if np.isfinite(g))])
    for fill in FILLINGS:  # without effect on an engine without padding
        with _unchanged(written), same_rng(), filling(fill):
            got = _numbers(dynamic(*args, **kwargs), written)
        for part, value in wanted.items():
            unit = scale if part.startswith("gradient") else max(1.0, _largest(value))
            difference = _difference(value, got[part]) / unit
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


def _difference(wanted: Any, got: Any) -> float:
    """Returns the largest difference; infinite if shapes or the places of NaN or inf differ."""
    if wanted.shape != got.shape:
        return float("inf")
    if not wanted.size:
        return 0.0
    wanted, got = wanted.astype("float64"), got.astype("float64")
    same = (wanted == got) | (np.isnan(wanted) & np.isnan(got))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(wanted - got))
    return float(np.nan_to_num(difference, nan=np.inf).max())
