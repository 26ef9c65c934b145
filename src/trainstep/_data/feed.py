"""`feed`: chooses the `Feed` for whatever a user passes as data.

Every feed yields batches `(x, y, weights)`, with None for an absent part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import keras
from keras import tree

from trainstep._common.errors import ArgumentError
from trainstep._data.arrays import Arrays, as_numpy_structure
from trainstep._data.batch_checks import check_positive, unpack_batch
from trainstep._data.protocol import Batch, Feed
from trainstep._data.streams import ArrayStream, PyDatasetStream, Stream


def feed(
    x: Any,
    y: Any = None,
    weights: Any = None,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    shuffle: bool = False,
) -> Feed:
    """Returns the feed of arrays, a data set, a loader, a generator or a function."""
    check_positive("Trainer", batch_size=batch_size, steps_per_epoch=steps)
    if not _yields_batches(x):
        arrays = Arrays((x, y, weights), batch_size, steps, shuffle)
        return arrays if steps in (None, arrays.steps) else ArrayStream(arrays, steps)
    if y is not None or weights is not None:
        raise ArgumentError(
            "Trainer",
            "y" if y is not None else "sample_weight",
            f"nothing besides a {type(x).__name__}, which yields (x, y, sample_weight) itself",
            f"a {type(y if y is not None else weights).__name__}",
            "let the data set yield the targets and weights",
        )
    if isinstance(x, keras.utils.PyDataset):
        return PyDatasetStream(x, steps, shuffle)
    if callable(x) and not hasattr(x, "__iter__"):
        return Stream(lambda: iter(x()), steps)
    if isinstance(x, Iterator):  # cannot start again: later epochs read on from where it is
        return Stream(lambda: x, steps)
    return Stream(lambda: iter(x), steps, _length(x))


def split_batch(x: Any, y: Any, weights: Any) -> Batch:
    """Splits an `x` that is `(x, y)` or `(x, y, sample_weight)` into its parts."""
    if y is None and isinstance(x, tuple) and 2 <= len(x) <= 3 and not _yields_batches(x[0]):
        return unpack_batch(x)
    return x, y, weights


def split_validation(batch: Batch, fraction: float) -> tuple[Batch, Batch]:
    """Splits arrays into a first part for training and a last part for validation."""
    if _yields_batches(batch[0]):
        raise ArgumentError(
            "Trainer.fit",
            "validation_split",
            "arrays, which can be split",
            f"a {type(batch[0]).__name__}",
            "pass `validation_data`",
        )
    batch = as_numpy_structure(batch)
    count = len(tree.flatten(batch)[0])
    at = math.floor(count * (1.0 - fraction))
    if not 0 < at < count:
        raise ArgumentError(
            "Trainer.fit",
            "validation_split",
            f"a fraction that leaves samples on both sides of {count}",
            f"{fraction}",
            "choose another, or pass `validation_data`",
        )
    first: Any = tree.map_structure(lambda a: None if a is None else a[:at], batch)
    last: Any = tree.map_structure(lambda a: None if a is None else a[at:], batch)
    return first, last


def _yields_batches(x: Any) -> bool:
    """Whether `x` yields batches; False for an array and a structure of arrays."""
    if isinstance(x, (keras.utils.PyDataset, Iterator)):
        return True
    if isinstance(x, (list, tuple, dict)) or hasattr(x, "shape") or hasattr(x, "__array__"):
        return False
    return hasattr(x, "__iter__") or callable(x) or hasattr(x, "__getitem__")


def _length(x: Any) -> int | None:
    try:
        return len(x)
    except TypeError:  # how `tf.data` reports an unknown or infinite length
        return None
