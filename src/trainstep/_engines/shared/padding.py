"""Padding: an array as the first part of a larger one.

The values of the padding do not affect results. It repeats the first row, which is finite and valid
as an index, so no operation is slow on it. Tests and `verify` pad with NaN or noise instead.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

_SMALL = 131072  # bytes; a smaller array costs less to copy twice than to align
_ALIGNMENT = 64

Fill = Callable[[Any, Any], None]  # writes the padding, given the padding and the first row


def aligned(shape: Sequence[int], dtype: Any, kind: type[bytearray] = bytearray) -> Any:
    """Returns an uninitialized array in new memory that is aligned, so JAX uses it without a copy.

    The memory is a bytearray, not an array: NumPy sets the `base` of a view to the array that owns
    the memory, so every view of the returned array holds a reference to that array.
    """
    dtype = np.dtype(dtype)
    memory = kind(math.prod(shape) * dtype.itemsize + _ALIGNMENT)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % _ALIGNMENT
    return np.ndarray(shape, dtype, memory, start)


def own(x: Any) -> Any:
    """Returns a copy of an array, aligned if it is large."""
    if x.nbytes <= _SMALL:
        return x.copy()
    copy = aligned(x.shape, x.dtype)
    copy[...] = x
    return copy


class Padding:
    """Pads arrays to one shape.

    Args:
        shape: The padded shape.
        dtype: The dtype of the arrays.
        axes: The axes to pad.
    """

    __slots__ = ("_axes", "_dtype", "_make", "_shape")

    def __init__(self, shape: tuple[int, ...], dtype: Any, axes: Sequence[int]) -> None:
        self._shape, self._dtype, self._axes = shape, np.dtype(dtype), list(axes)
        small = math.prod(shape) * self._dtype.itemsize <= _SMALL
        self._make: Callable[..., Any] = np.empty if small else aligned

    def __call__(self, x: Any) -> Any:
        """Returns a padded copy of an array."""
        if type(x) is not np.ndarray:
            x = np.asarray(x)
        full = self._make(self._shape, self._dtype)
        if self._axes != [0]:
            return self._pad_axes(x, full)
        size = len(x)
        full[:size] = x
        if size < len(full):
            if _fill is _by_first:  # the usual case, without a call
                full[size:] = x[0]
            else:
                _fill(full[size:], full[0])
        return full

    def _pad_axes(self, x: Any, full: Any) -> Any:
        full[tuple(map(slice, x.shape))] = x
        for axis in self._axes:
            size = x.shape[axis]
            if size < self._shape[axis]:
                # Axes before this one are padded already, axes after it are not.
                before = (slice(None),) * axis
                after = tuple(map(slice, x.shape[axis + 1 :]))
                first = full[(*before, slice(0, 1), *after)]
                _fill(full[(*before, slice(size, None), *after)], first)
        return full


def _by_first(beyond: Any, first: Any) -> None:
    beyond[...] = first


_fill: Fill = _by_first


def _by_nan(beyond: Any, first: Any) -> None:
    """Pads with NaN; with the largest number where the dtype has no NaN."""
    kind = beyond.dtype.kind
    if kind in "iu":
        beyond[...] = np.iinfo(beyond.dtype).max
    else:
        beyond[...] = True if kind == "b" else np.nan


def _by_garbage(beyond: Any, first: Any) -> None:
    """Pads with large random numbers."""
    rng = np.random.default_rng(beyond.size)
    noise = rng.normal(0.0, 50.0, beyond.shape)
    beyond[...] = (
        noise > 0
        if beyond.dtype.kind == "b"
        else np.abs(noise)
        if (beyond.dtype.kind == "u")
        else noise
    )


FILLINGS: dict[str, Fill] = {"nan": _by_nan, "garbage": _by_garbage}


@contextlib.contextmanager
def filling(kind: str) -> Iterator[None]:
    """Pads with "nan" or "garbage" in a block, to test that padding does not affect results.

    Example:
        >>> import numpy as np
        >>> from trainstep.testing import filling
        >>> with filling("nan"):
        ...     pass  # calls in here are padded with NaN
    """
    global _fill
    _fill = FILLINGS[kind]
    try:
        yield
    finally:
        _fill = _by_first
