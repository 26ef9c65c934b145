"""Feeds for jobs of several processes.

Arrays, in memory or mapped from a file, must be the same in every process: each process reads only
the rows that its own devices need. Any other source yields each process its own rows, and the batch
of a step joins the rows of all processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from trainstep._common.errors import StrategyError
from trainstep._data.arrays import Arrays, as_numpy_structure
from trainstep._data.protocol import Batch, BatchGroup, Feed, iterate_batches
from trainstep._data.streams import ArrayStream, Stream
from trainstep._state.outputs import take_out


def per_process_feed(feed: Feed, layout: Any) -> Feed:
    """Returns a feed that lays batches out over processes; with one process, the step does so."""
    if layout is None or layout.processes == 1:
        return feed
    if isinstance(feed, Arrays):
        return ProcessArrays(feed, layout)
    if isinstance(feed, ArrayStream):
        return ProcessArrayStream(ProcessArrays(feed.arrays, layout), feed.steps)
    return ProcessStream(feed, layout)


class ProcessArrays:
    """The feed of arrays of which each process reads its own rows.

    Every process reads a batch whole that the devices do not divide evenly.
    """

    def __init__(self, arrays: Arrays, layout: Any) -> None:
        self._arrays, self._layout = arrays, layout
        self.steps = arrays.steps

    def epoch(self, steps_per_call: int) -> Iterator[BatchGroup]:
        """Yields the batches of one epoch."""
        arrays, size = self._arrays, self._arrays.batch_size
        if arrays.shuffle:
            # Every process must draw the same order, so all continue from the RNG state of the
            # first process.
            state: Any = np.random.get_state()
            keys, position = self._layout.agree([state[1], np.uint32(state[2])])
            np.random.set_state((state[0], np.asarray(keys), int(position), *state[3:]))
        order = arrays.row_order()
        full, call_rows = arrays.row_count // size, steps_per_call * size
        stacked = full // steps_per_call * call_rows if steps_per_call > 1 else 0
        for start in range(0, stacked, call_rows):
            rows = order[start : start + call_rows].reshape(steps_per_call, size)
            yield BatchGroup(steps_per_call, [self._batch(rows)])
        rest = [order[start : start + size] for start in range(stacked, arrays.row_count, size)]
        yield BatchGroup(1, map(self._batch, rest))

    def restart(self) -> None:
        """Does nothing: every epoch starts from the first batch."""

    def skip_epochs(self, epochs: int) -> None:
        """Does nothing: the row order depends on the state of NumPy's generator only."""

    def batches(self) -> Iterator[Batch]:
        """Iterates over the single batches of one epoch."""
        return iterate_batches(self.epoch(1))

    def _batch(self, rows: Any) -> Batch:
        axis = rows.ndim - 1

        def laid_out(leaf: Any) -> Any:
            def read(part: tuple[slice, ...]) -> Any:
                return leaf[rows[part[: rows.ndim]]]

            return self._layout.assembled((*rows.shape, *leaf.shape[1:]), axis, read)

        return self._arrays.build.of(list(map(laid_out, self._arrays.leaves)))  # type: ignore[no-any-return]


class ProcessArrayStream(Stream):
    """`ProcessArrays` with a given number of steps per epoch."""

    def __init__(self, arrays: ProcessArrays, steps: int | None) -> None:
        super().__init__(arrays.batches, steps)

    def epoch(self, steps_per_call: int) -> Iterator[BatchGroup]:
        """Yields the batches of one epoch, never stacked: they are laid out already."""
        return super().epoch(1)


class ProcessStream:
    """The feed of a source that yields each process its own rows of a batch."""

    def __init__(self, feed: Feed, layout: Any) -> None:
        self._feed, self._layout = feed, layout
        self.steps = feed.steps

    def epoch(self, steps_per_call: int) -> Iterator[BatchGroup]:
        """Yields the batches of one epoch, never stacked: another process may have fewer."""
        yield BatchGroup(1, join_batches(iterate_batches(self._feed.epoch(1)), self._layout))

    def restart(self) -> None:
        """Starts from the first batch again, where the source can."""
        self._feed.restart()

    def skip_epochs(self, epochs: int) -> None:
        """Skips epochs of this process's own batches."""
        self._feed.skip_epochs(epochs)


def join_batches(own_batches: Iterable[Any], layout: Any) -> Iterator[Any]:
    """Joins each batch with those of the other processes, until every process is exhausted."""
    batches, last, build = iter(own_batches), None, None
    while True:
        batch = next(batches, None)
        leaves = None
        if batch is not None:
            leaves, build = take_out(
                as_numpy_structure(batch), lambda x: isinstance(x, np.ndarray), ()
            )
            last = leaves
        # A process without a batch still takes part: joining is a collective operation. Its last
        # batch gives the shapes.
        whole = layout.joined(leaves, last)
        if whole is None:
            return
        if build is None:
            raise StrategyError(
                "this process has no data.\n"
                "  expected: at least one batch in every process\n"
                "  got:      none in this process, and some in others\n"
                "  to fix:   split the data so that each process has some"
            )
        yield build.of(whole)
