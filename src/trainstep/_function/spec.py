"""`Spec`: the declared shape and dtype of an argument, and the check of a call against it."""

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
        shape: One entry per axis: a size; `None`, any size; or a name, any size that is equal
            wherever the name stands.
        dtype: The dtype that the step sees, as a string.
        name: How messages call the argument; the parameter's own name by default.

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
        """An array of this shape, for compiling ahead of the first batch."""
        if not all(isinstance(size, int) for size in self.shape):
            raise ArgumentError(
                function,
                argument,
                "a size on every axis",
                str(self),
                "give `warm_up` the size that the first batch will have, or the `largest` one",
            )
        return np.zeros(self.sizes(), "float32" if self.dtype == "bfloat16" else self.dtype)

    def sizes(self) -> tuple[int, ...]:
        """The shape, of which every size is known."""
        return tuple(int(size or 0) for size in self.shape)

    def sized(self, size_of: Callable[[str | None], int | str | None]) -> Spec:
        """The same with sizes in place of names and None."""
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
    """Raises an `ArgumentError` that names the axis unless the array fits."""
    argument = spec.name or argument
    came = array_text(shape, dtype)
    if len(shape) != len(spec.shape):
        cure = f"pass an array with {len(spec.shape)} axes"
        raise ArgumentError(function, argument, str(spec), f"{came}: {len(shape)} axes", cure)
    for axis, (size, want) in enumerate(zip(shape, spec.shape, strict=True)):
        if isinstance(want, int) and size != want:
            raise ArgumentError(
                function,
                argument,
                str(spec),
                f"{came}: axis {axis} is {size}, not {want}",
                f"pass size {want} on axis {axis}, or declare the axis as None",
            )
    if dtype != canonical(spec.dtype):
        raise ArgumentError(
            function,
            argument,
            str(spec),
            f"{came}: the dtype is {dtype}",
            f"convert it with `.astype({spec.dtype!r})`, or declare dtype={dtype!r}",
        )
