"""Splits arrays in memory into batches, in order or shuffled."""

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
from trainstep._data.batch_checks import check_dense, check_lengths, is_array_sequence
from trainstep._data.prefetch import prefetch
from trainstep._data.protocol import Batch, BatchGroup, iterate_batches
from trainstep._state.outputs import take_out

_PREFETCH_CHUNKS = 8  # with fewer chunks, a prefetch thread costs more than it saves
_CHUNK_BYTES = 1 << 20  # bytes gathered at once; each batch is then a slice of the chunk


class Arrays:
    """The feed of arrays in memory.

    Attributes:
        leaves: The arrays, flattened.
        build: Packs as many arrays into the structure of a batch.
        row_count: The number of rows.
        batch_size: The number of rows in a batch.
        shuffle: Whether each epoch has its own row order.
        steps: The number of batches in an epoch; the last one may be short.
    """

    def __init__(self, batch: Batch, batch_size: int | None, steps: int | None, shuffle: bool):
        check_lengths("Trainer", *batch)
        batch = as_numpy_structure(batch)
        leaves, self.build = take_out(batch, _is_array, ())
        self.leaves: list[np.ndarray[Any, Any]] = leaves
        self.row_count = len(leaves[0])
        # True for x, (x, y) and (x, y, weights) of single arrays: a tuple of rows is then a batch.
        single = [isinstance(part, np.ndarray) for part in batch]
        absent_last = single == sorted(single, reverse=True)
        self._leaves_are_a_batch = absent_last and sum(single) == len(leaves)
        self.batch_size = batch_size or (math.ceil(self.row_count / steps) if steps else 32)
        self.shuffle = shuffle
        self.steps: int | None = math.ceil(self.row_count / self.batch_size)

    def epoch(self, steps_per_call: int) -> Iterator[BatchGroup]:
        row_bytes = sum(leaf[:1].nbytes for leaf in self.leaves)
        call_rows = self.batch_size * steps_per_call
        slices = _chunk_slices(
            self.row_count, call_rows, _CHUNK_BYTES // (row_bytes * call_rows or 1)
        )
        chunks = self._shuffled_chunks(slices) if self.shuffle else map(self._slice_rows, slices)
        for chunk in chunks:
            stacked = len(chunk[0]) // call_rows * call_rows
            if stacked:
                yield self._full_batches([leaf[:stacked] for leaf in chunk], steps_per_call)
            # Fewer batches than a stack needs go one by one, and the short last batch after them.
            rest = [leaf[stacked:] for leaf in chunk]
            full = len(rest[0]) // self.batch_size * self.batch_size
            if full:
                yield self._full_batches([leaf[:full] for leaf in rest], 1)
            if len(rest[0]) > full:
                yield BatchGroup(1, [self.build.of([leaf[full:] for leaf in rest])])

    def _slice_rows(self, rows: Any) -> list[Any]:
        return [leaf[rows] for leaf in self.leaves]

    def _shuffled_chunks(self, slices: Iterable[slice]) -> Iterator[list[Any]]:
        """Yields chunks of rows in the order of an epoch, with prefetch where that pays."""
        order, engine = self.row_order(), _engines.current()
        gatherers = [engine.taker(leaf) for leaf in self.leaves]

        def gather_rows(rows: slice) -> list[Any]:
            return [gather(order[rows]) for gather in gatherers]

        # Gathering rows from all over the memory waits for memory and uses little CPU, so a second
        # thread pays off. An asynchronous engine does not need one: this thread is free anyway.
        size = sum(leaf.nbytes for leaf in self.leaves)
        if size < _PREFETCH_CHUNKS * _CHUNK_BYTES or not engine.is_synchronous:
            yield from map(gather_rows, slices)
            return
        yield from prefetch(gather_rows, slices)

    def row_order(self) -> Any:
        """Returns the row numbers in the order of a new epoch."""
        return np.random.permutation(self.row_count) if self.shuffle else np.arange(self.row_count)

    def restart(self) -> None:
        """Does nothing: every epoch starts from the first batch."""

    def skip_epochs(self, epochs: int) -> None:
        """Does nothing: the row order depends on the state of NumPy's generator only."""

    def batches(self) -> Iterator[Batch]:
        """Iterates over the single batches of one epoch."""
        return iterate_batches(self.epoch(1))

    def _full_batches(self, leaves: Sequence[Any], steps_per_call: int) -> BatchGroup:
        """Groups full batches, or stacks of them, without slicing each one in Python."""
        # After the reshape, NumPy's own iteration over the first axis yields the batches.
        stack = () if steps_per_call == 1 else (steps_per_call,)
        rows = _engines.current().rows
        leaf_batches = [
            rows(leaf.reshape(-1, *stack, self.batch_size, *leaf.shape[1:])) for leaf in leaves
        ]
        length = len(leaves[0]) // (self.batch_size * steps_per_call)
        if self._leaves_are_a_batch:
            absent = [itertools.repeat(None)] * (3 - len(leaf_batches))
            batches: Any = zip(*leaf_batches, *absent, strict=False)
        else:
            batches = map(self.build.of, zip(*leaf_batches, strict=True))
        return BatchGroup(steps_per_call, batches, length)


def _chunk_slices(row_count: int, call_rows: int, max_calls: int) -> Iterator[slice]:
    """Splits the rows into chunks of 1, 8, 64, ... calls, so that the first one is ready soon."""
    start, calls = 0, 1
    while start < row_count:
        yield slice(start, start + call_rows * calls)
        start += call_rows * calls
        calls = max(1, min(8 * calls, max_calls))


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray)


def as_numpy_structure(value: Any) -> Any:
    """Converts the leaves of a structure to NumPy arrays."""
    if isinstance(value, dict):
        return {key: as_numpy_structure(value[key]) for key in value}
    if is_array_sequence(value):
        return like(value, [as_numpy_structure(item) for item in value])
    return None if value is None else as_numpy(value)


def as_numpy(x: Any) -> Any:
    """Converts to a NumPy array, and float64 to `floatx`: once here, not in every batch."""
    array = x if isinstance(x, np.ndarray) else _convert(x)
    return array.astype(keras.config.floatx()) if array.dtype == np.float64 else array


def _convert(x: Any) -> Any:
    check_dense("Trainer", "x", x)
    array = ops.convert_to_numpy(x) if keras.ops.is_tensor(x) else np.asarray(x)
    # Keras adds a second axis to a pandas series; a model must see the same shape here.
    return array[:, None] if type(x).__name__ == "Series" and array.ndim == 1 else array
