"""Indexing by integer tensors, `x[i, :]`: Keras has only `keras.ops.take` for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from trainstep._common.errors import ArgumentError

_ALL = slice(None)


def has_tensors(keys: Sequence[Any]) -> bool:
    """Whether a key, or a bound of a slice, is a tensor."""
    bounds = [b for k in keys if isinstance(k, slice) for b in (k.start, k.stop, k.step)]
    return any(isinstance(each, keras.KerasTensor) for each in (*keys, *bounds))


def take(tensor: Any, keys: Sequence[Any]) -> Any:
    """Indexes a tensor: first by the integer tensors among the keys, then by the other keys.

    Args:
        tensor: The tensor.
        keys: One key for each axis; None, Ellipsis and slices as in NumPy.
    """
    named = sum(key is not None and key is not Ellipsis for key in keys)
    if named > len(tensor.shape):
        raise _index_error(f"{named} keys for {len(tensor.shape)} axes", "remove the extra keys")
    keys = _with_all_axes(keys, len(tensor.shape))
    tensors = [key for key in keys if isinstance(key, keras.KerasTensor)]
    _check(keys, tensors)
    left: list[Any] = []
    axis = len(tensor.shape)
    for key in reversed(keys):  # last axis first: `take` may remove its axis or add axes
        axis -= key is not None
        if isinstance(key, keras.KerasTensor):
            tensor = ops.take(tensor, key, axis=axis)
            left[:0] = [_ALL] * len(key.shape)
        else:
            left.insert(0, key)
    if all(isinstance(key, slice) and key == _ALL for key in left):
        return tensor
    return keras.KerasTensor.__getitem__(tensor, tuple(left))


def _with_all_axes(keys: Sequence[Any], axes: int) -> list[Any]:
    """Adds a full slice for each axis that Ellipsis covers or that has no key."""
    place = next((i for i, key in enumerate(keys) if key is Ellipsis), len(keys))
    before, after = keys[:place], keys[place + 1 :]
    missing = axes - sum(key is not None for key in (*before, *after))
    return [*before, *[_ALL] * missing, *after]


def _check(keys: Sequence[Any], tensors: Sequence[Any]) -> None:
    got, cure = "", ""
    if has_tensors([key for key in keys if isinstance(key, slice)]):
        got = "a slice whose bounds are tensors"
        cure = "use a slice of fixed size: `keras.ops.slice(x, (i, 0), (2, 3))`"
    elif any("int" not in key.dtype for key in tensors):
        other = next(key.dtype for key in tensors if "int" not in key.dtype)
        got = f"a tensor of {other}"
        cure = "mask with `keras.ops.where(mask, x, 0.0)`; cast numbers with `keras.ops.cast`"
    elif any(map(_axes, tensors)) and any(not _axes(k) for k in keys if not _is_basic(k)):
        got = "a tensor with axes beside other indices"
        cure = "index one axis at a time: `x[i][:, 0]`"
    elif sum(_axes(key) > 0 for key in tensors) > 1:
        got = "several tensors with axes"
        cure = "index one axis at a time, or use `keras.ops.take_along_axis`"
    if got:
        raise _index_error(got, cure)


def _index_error(got: str, cure: str) -> ArgumentError:
    return ArgumentError("x[...]", "key", "numbers, slices and integer tensors", got, cure)


def _axes(key: Any) -> int:
    return len(getattr(key, "shape", ()))


def _is_basic(key: Any) -> bool:
    return key is None or isinstance(key, slice)
