"""`Spec`: the declared shape and dtype of an argument, and the check of an array against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainstep._common.errors import ArgumentError
from trainstep._explain.signature import array_text


@dataclass(frozen=True)
class Spec:
    """The shape and dtype of an array argument; `None` is any size.

    Args:
        shape: One entry per axis: a size; `None`, any size; or a name, any size, equal on all axes
            of that name.
        dtype: The dtype that the step sees, as a string.
        name: The name of the argument in messages; by default that of the parameter.

    Example:
        >>> from trainstep import Spec
        >>> print(Spec((None, 20)))
        float32[?,20]
    """

    shape: tuple[int | str | None, ...]
    dtype: str = "float32"
    name: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(
            self, "dtype", np.dtype(self.dtype).name if self.dtype != "bfloat16" else "bfloat16"
        )

    def __str__(self) -> str:
        return array_text(self.shape, self.dtype)

    def zeros(self, function: str, argument: str) -> Any:
        """Returns an array of zeros of this shape, for `warm_up`."""
        if not all(isinstance(size, int) for size in self.shape):
            raise ArgumentError(
                function,
                argument,
                "a size on every axis",
                str(self),
                "pass `warm_up` a Spec with the size of the first batch, or the `largest` size",
            )
        return np.zeros(self.sizes(), "float32" if self.dtype == "bfloat16" else self.dtype)

    def sizes(self) -> tuple[int, ...]:
        """Returns the shape, all of whose sizes have to be known."""
        return tuple(int(size or 0) for size in self.shape)

    def sized(self, size_of: Callable[[str | None], int | str | None]) -> Spec:
        """Returns the spec with sizes in the places of names and None."""
        known = [size if isinstance(size, int) else size_of(size) for size in self.shape]
        return Spec(tuple(known), self.dtype, self.name)


def check(
    spec: Spec,
    shape: tuple[int, ...],
    dtype: str,
    *,
    function: str,
    argument: str,
    canonical: Callable[[str], str],
) -> None:
    """Raises an `ArgumentError`, which names the axis, unless the array fits."""
    argument = spec.name or argument
    got = array_text(shape, dtype)
    if len(shape) != len(spec.shape):
        cure = f"pass an array with {len(spec.shape)} axes"
        raise ArgumentError(function, argument, str(spec), f"{got}: {len(shape)} axes", cure)
    for axis, (size, want) in enumerate(zip(shape, spec.shape, strict=True)):
        if isinstance(want, int) and size != want:
            raise ArgumentError(
                function,
                argument,
                str(spec),
                f"{got}: axis {axis} is {size}, not {want}",
                f"pass size {want} on axis {axis}, or declare the axis as None",
            )
    if dtype != canonical(spec.dtype):
        raise ArgumentError(
            function,
            argument,
            str(spec),
            f"{got}: the dtype is {dtype}",
            f"convert it with `.astype({spec.dtype!r})`, or declare dtype={dtype!r}",
        )
