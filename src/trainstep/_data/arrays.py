"""Batches of arrays in memory, in order or shuffled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from trainstep import _engines
from trainstep._common.structure import like
from trainstep._data.batch_checks import check_dense, check_lengths, is_several
from trainstep._data.prefetch import ahead
from trainstep._data.protocol import Batch, Stretch, all_of
from trainstep._state.outputs import take_out

_AHEAD = 8  # chunks that there have to be for another thread to be worth its while
_CHUNK = 1 << 20  # bytes that are shuffled at once: a batch is then a slice, not a gather


class Arrays:
    """Arrays in memory, cut into batches.

    Attributes:
        leaves: The arrays.
        build: Makes a batch of as many.
        count: How many rows there are.
        size: How many a batch has.
        shuffles: Whether each epoch has an order of its own.
    """

    def __init__(self, batch: Batch, batch_size: int | None, steps: int | None, shuffle: bool):
        check_lengths("Trainer", *batch)
        batch = in_memory(batch)
        leaves, self.build = take_out(batch, _is_array, ())
        self.leaves: list[np.ndarray[Any, Any]] = leaves
        self.count = len(leaves[0])
        arrays = [isinstance(part, np.ndarray) for part in batch]
        self._is_plain = arrays == sorted(arrays, reverse=True) and sum(arrays) == len(leaves)
        self.size = batch_size or (math.ceil(self.count / steps) if steps else 32)
        self.shuffles = shuffle
        self.steps: int | None = math.ceil(self.count / self.size)

    def epoch(self, group: int) -> Iterator[Stretch]:
        row = sum(leaf[:1].nbytes for leaf in self.leaves)
        step = self.size * group
        chunks = _chunks(self.count, step, _CHUNK // (row * step or 1))
        for cut in self._shuffled(chunks) if self.shuffles else map(self._cut, chunks):
            whole = len(cut[0]) // step * step
            if whole:
                yield self._stretch([leaf[:whole] for leaf in cut], group)
            rest = [leaf[whole:] for leaf in cut]
            full = len(rest[0]) // self.size * self.size
            if full:
                yield self._stretch([leaf[:full] for leaf in rest], 1)
            if len(rest[0]) > full:
                yield Stretch(1, [self.build.of([leaf[full:] for leaf in rest])])

    def _cut(self, rows: Any) -> list[Any]:
        return [leaf[rows] for leaf in self.leaves]

    def _shuffled(self, chunks: Iterable[slice]) -> Iterator[list[Any]]:
        """Chunks of the rows in the order of an epoch; the next may be taken by another thread."""
        order, engine = self.order(), _engines.current()
        takers = [engine.taker(leaf) for leaf in self.leaves]

        def taken(rows: slice) -> list[Any]:
            return [taker(order[rows]) for taker in takers]

        # To fetch rows from all over the memory takes long, and needs little of a processor. On an
        # engine that does not wait, this thread has the time for it.
        size = sum(leaf.nbytes for leaf in self.leaves)
        if size < _AHEAD * _CHUNK or not engine.is_synchronous:
            yield from map(taken, chunks)
            return
        yield from ahead(taken, chunks)

    def order(self) -> Any:
        """The rows in the order of an epoch."""
        return np.random.permutation(self.count) if self.shuffles else np.arange(self.count)

    def restart(self) -> None:
        """Every epoch starts from the first batch."""

    def pass_over(self, epochs: int) -> None:
        """The order of an epoch depends on NumPy's generator alone."""

    def batches(self) -> Iterator[Batch]:
        """The batches of one epoch, one by one."""
        return all_of(self.epoch(1))

    def _stretch(self, leaves: Sequence[Any], group: int) -> Stretch:
        """Full batches, or groups of them, one after the other; Python does not cut them."""
        lead = (-1, self.size) if group == 1 else (-1, group, self.size)
        rows = _engines.current().rows
        cut = [rows(leaf.reshape(*lead, *leaf.shape[1:])) for leaf in leaves]
        length = len(leaves[0]) // (self.size * group)
        if self._is_plain:  # a row of leaves is a batch already
            batches: Any = zip(*cut, *[itertools.repeat(None)] * (3 - len(cut)), strict=False)
        else:
            batches = map(self.build.of, zip(*cut, strict=True))
        return Stretch(group, batches, length)


def _chunks(count: int, step: int, most: int) -> Iterator[slice]:
    """Rows in chunks of 1, 8, 64, ... steps: the first is soon ready, and the others meanwhile."""
    start, steps = 0, 1
    while start < count:
        yield slice(start, start + step * steps)
        start += step * steps
        steps = max(1, min(8 * steps, most))


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray)


def in_memory(value: Any) -> Any:
    """The structure with NumPy arrays as leaves."""
    if isinstance(value, dict):
        return {key: in_memory(value[key]) for key in value}
    if is_several(value):
        return like(value, [in_memory(item) for item in value])
    return None if value is None else as_numpy(value)


def as_numpy(x: Any) -> Any:
    """An array in memory; a float64 one becomes Keras's float type once, not at every batch."""
    array = x if isinstance(x, np.ndarray) else _converted(x)
    return array.astype(keras.config.floatx()) if array.dtype == np.float64 else array


def _converted(x: Any) -> Any:
    check_dense("Trainer", "x", x)
    array = ops.convert_to_numpy(x) if keras.ops.is_tensor(x) else np.asarray(x)
    # Keras gives a pandas series a second axis.
    return array[:, None] if type(x).__name__ == "Series" and array.ndim == 1 else array
