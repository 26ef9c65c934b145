"""Data for several devices and processes.

Arrays are the same in every process, in memory or mapped from a file: each reads the rows that its
own devices need. Anything that yields batches yields a process its own rows, and the batch of the
step is those of all processes together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from trainstep._common.errors import StrategyError
from trainstep._data.arrays import Arrays, in_memory
from trainstep._data.protocol import Batch, Feed, Stretch, all_of
from trainstep._data.streams import Stream, Stretched
from trainstep._state.outputs import take_out


def shared(feed: Feed, layout: Any) -> Feed:
    """A feed whose batches are laid out; itself where the steps do so anyhow."""
    if layout is None or layout.processes == 1:
        return feed
    if isinstance(feed, Arrays):
        return ArrayShares(feed, layout)
    if isinstance(feed, Stretched):
        return StretchedShares(ArrayShares(feed.arrays, layout), feed.steps)
    return Shares(feed, layout)


class ArrayShares:
    """Arrays, of which each process reads its own rows.

    The rows of a batch that the devices do not divide are read by all.
    """

    def __init__(self, arrays: Arrays, layout: Any) -> None:
        self._arrays, self._layout = arrays, layout
        self.steps = arrays.steps

    def epoch(self, group: int) -> Iterator[Stretch]:
        """The batches of one epoch."""
        arrays, size = self._arrays, self._arrays.size
        if arrays.shuffles:  # all in the order of the first
            state: Any = np.random.get_state()
            keys, place = self._layout.agree([state[1], np.uint32(state[2])])
            np.random.set_state((state[0], np.asarray(keys), int(place), *state[3:]))
        order = arrays.order()
        full = arrays.count // size
        grouped = full // group * group if group > 1 else 0
        for first in range(0, grouped, group):
            rows = order[first * size : (first + group) * size].reshape(group, size)
            yield Stretch(group, [self._batch(rows)])
        rest = [order[start : start + size] for start in range(grouped * size, arrays.count, size)]
        yield Stretch(1, map(self._batch, rest))

    def restart(self) -> None:
        """Every epoch starts from the first batch."""

    def pass_over(self, epochs: int) -> None:
        """The order of an epoch depends on NumPy's generator alone."""

    def batches(self) -> Iterator[Batch]:
        """The batches of one epoch, one by one."""
        return all_of(self.epoch(1))

    def _batch(self, rows: Any) -> Batch:
        axis = rows.ndim - 1

        def laid_out(leaf: Any) -> Any:
            def read(part: tuple[slice, ...]) -> Any:
                return leaf[rows[part[: rows.ndim]]]

            return self._layout.assembled((*rows.shape, *leaf.shape[1:]), axis, read)

        return self._arrays.build.of(list(map(laid_out, self._arrays.leaves)))  # type: ignore[no-any-return]


class StretchedShares(Stream):
    """The same in epochs of another length than that of the arrays."""

    def __init__(self, shares: ArrayShares, steps: int | None) -> None:
        super().__init__(shares.batches, steps)

    def epoch(self, group: int) -> Iterator[Stretch]:
        """The batches of one epoch, one by one: they are laid out already."""
        return super().epoch(1)


class Shares:
    """Batches that each process has a part of."""

    def __init__(self, feed: Feed, layout: Any) -> None:
        self._feed, self._layout = feed, layout
        self.steps = feed.steps

    def epoch(self, group: int) -> Iterator[Stretch]:
        """The batches of one epoch, one by one: whether all processes have so many is not known."""
        yield Stretch(1, joined(all_of(self._feed.epoch(1)), self._layout))

    def restart(self) -> None:
        """Starts from the first batch again, where the source can."""
        self._feed.restart()

    def pass_over(self, epochs: int) -> None:
        """Leaves epochs of this process's own batches out."""
        self._feed.pass_over(epochs)


def joined(own: Iterable[Any], layout: Any) -> Iterator[Any]:
    """The batches of all processes, of this one's; until the last of them has ended."""
    batches, last, build = iter(own), None, None
    while True:
        batch = next(batches, None)
        leaves = None
        if batch is not None:
            leaves, build = take_out(in_memory(batch), lambda x: isinstance(x, np.ndarray), ())
            last = leaves
        whole = layout.joined(leaves, last)
        if whole is None:
            return
        if build is None:
            raise StrategyError(
                "this process has no data.\n"
                "  expected: at least one batch in every process\n"
                "  came:     none in this one, and some in others\n"
                "  to fix:   share the data out so that each process has some"
            )
        yield build.of(whole)
