"""Feeds of batches that the user's code yields: generators, loaders, data sets."""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from keras import tree

from trainstep._common.keras_private import PyDatasetAdapter
from trainstep._data.arrays import Arrays, as_numpy_structure
from trainstep._data.batch_checks import unpack_batch
from trainstep._data.protocol import Batch, BatchGroup, iterate_batches

_END = object()


class Stream:
    """The feed of an iterator over batches.

    Args:
        make: Returns an iterator. With `steps`, it is called again only when an iterator is
            exhausted; without, once per epoch.
        steps: The number of batches in an epoch; None for all that an iterator yields.
        known_length: The number of batches that an iterator yields, if known.
    """

    def __init__(
        self, make: Callable[[], Iterator[Any]], steps: int | None, known_length: int | None = None
    ) -> None:
        self._make = make
        self._limit = steps
        self._batches: Iterator[Any] | None = None
        self.steps = steps or known_length

    def epoch(self, steps_per_call: int) -> Iterator[BatchGroup]:
        return _group_batches(map(unpack_batch, self._epoch_batches()), steps_per_call)

    def restart(self) -> None:
        """Makes a new iterator for the next epoch; a single-use iterator reads on."""
        self._batches = None

    def skip_epochs(self, epochs: int) -> None:
        """Reads epochs and drops them: only the user's code knows what its order depends on."""
        for _ in range(epochs):
            deque(iterate_batches(self.epoch(1)), maxlen=0)

    def _epoch_batches(self) -> Iterator[Any]:
        if self._limit is None:
            yield from self._make()
            return
        # The next epoch reads on from the same iterator, as in Keras.
        for step in range(self._limit):
            if self._batches is None:
                self._batches = self._make()
            batch = next(self._batches, _END)
            if batch is _END:
                self._batches = None
                if step:
                    warnings.warn(
                        f"the data ended after {step} of {self._limit} steps of the epoch",
                        stacklevel=2,
                    )
                    return
                # The last epoch ended exactly where the iterator did: this one starts again.
                batch = next(self._restart_iterator(), _END)
                if batch is _END:
                    return
            yield batch

    def _restart_iterator(self) -> Iterator[Any]:
        self._batches = self._make()
        return self._batches


class ArrayStream(Stream):
    """The feed of arrays with a given number of steps per epoch, which may end within the arrays.

    Attributes:
        arrays: The arrays.
    """

    def __init__(self, arrays: Arrays, steps: int) -> None:
        super().__init__(arrays.batches, steps)
        self.arrays = arrays


class PyDatasetStream(Stream):
    """The feed of a `keras.utils.PyDataset`, with its workers and epoch hooks."""

    def __init__(self, data: Any, steps: int | None, shuffle: bool) -> None:
        adapter = PyDatasetAdapter(x=data, class_weight=None, shuffle=shuffle)
        self._adapter = adapter
        super().__init__(lambda: iter(adapter.get_numpy_iterator()), steps, adapter.num_batches)

    def epoch(self, steps_per_call: int) -> Iterator[BatchGroup]:
        self._adapter.on_epoch_begin()
        yield from super().epoch(steps_per_call)
        self._adapter.on_epoch_end()


def _group_batches(batches: Iterable[Batch], steps_per_call: int) -> Iterator[BatchGroup]:
    """Stacks batches by `steps_per_call`; a short or mixed-shape stack goes batch by batch."""
    if steps_per_call == 1:
        yield BatchGroup(1, batches)
        return
    iterator = iter(batches)
    while stack := list(itertools.islice(iterator, steps_per_call)):
        shapes = {tuple(np.shape(a) for a in tree.flatten(batch)) for batch in stack}
        if len(stack) == steps_per_call and len(shapes) == 1:
            yield BatchGroup(steps_per_call, [_stack(stack)])
        else:
            yield BatchGroup(1, stack)


def _stack(batches: Sequence[Batch]) -> Batch:
    arrays = [as_numpy_structure(batch) for batch in batches]
    stacked: Batch = tree.map_structure(lambda *a: None if a[0] is None else np.stack(a), *arrays)
    return stacked
