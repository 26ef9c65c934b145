"""Batches that somebody else makes: generators, loaders, data sets."""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from keras import tree

from trainstep._data.arrays import Arrays, in_memory
from trainstep._data.batch_checks import unpacked
from trainstep._data.protocol import Batch, Stretch, all_of

_END = object()


class Stream:
    """Batches made by somebody else, one after the other.

    Args:
        make: Gives an iterator over batches; called for each epoch, or when the last one ended.
        steps: The batches of an epoch; without it, an epoch is all that the iterator has.
        known: How many the iterator has, if that is known.
    """

    def __init__(
        self, make: Callable[[], Iterator[Any]], steps: int | None, known: int | None = None
    ) -> None:
        self._make = make
        self._limit = steps
        self._batches: Iterator[Any] | None = None
        self.steps = steps or known

    def epoch(self, group: int) -> Iterator[Stretch]:
        return _grouped(map(unpacked, self._taken()), group)

    def restart(self) -> None:
        """Starts from the first batch again; an iterator goes on by itself."""
        self._batches = None

    def pass_over(self, epochs: int) -> None:
        """Draws the batches of epochs and drops them: nobody else knows what an order hangs on."""
        for _ in range(epochs):
            deque(all_of(self.epoch(1)), maxlen=0)

    def _taken(self) -> Iterator[Any]:
        if self._limit is None:
            yield from self._make()
            return
        # Over the end of an epoch the same iterator goes on, as under Keras.
        for taken in range(self._limit):
            if self._batches is None:
                self._batches = self._make()
            batch = next(self._batches, _END)
            if batch is _END:
                self._batches = None
                if taken:
                    warnings.warn(
                        f"the data ended after {taken} of {self._limit} steps of the epoch",
                        stacklevel=2,
                    )
                    return
                batch = next(self._make_again(), _END)
                if batch is _END:
                    return
            yield batch

    def _make_again(self) -> Iterator[Any]:
        self._batches = self._make()
        return self._batches


class Stretched(Stream):
    """Arrays in epochs of another length than theirs.

    Attributes:
        arrays: The arrays.
    """

    def __init__(self, arrays: Arrays, steps: int) -> None:
        super().__init__(arrays.batches, steps)
        self.arrays = arrays


class PyDatasets(Stream):
    """Keras's own data set class, with its workers and its hooks."""

    def __init__(self, data: Any, steps: int | None, shuffle: bool) -> None:
        from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

        adapter = PyDatasetAdapter(x=data, class_weight=None, shuffle=shuffle)
        self._adapter = adapter
        super().__init__(lambda: iter(adapter.get_numpy_iterator()), steps, adapter.num_batches)

    def epoch(self, group: int) -> Iterator[Stretch]:
        self._adapter.on_epoch_begin()
        yield from super().epoch(group)
        self._adapter.on_epoch_end()


def _grouped(batches: Iterable[Batch], group: int) -> Iterator[Stretch]:
    """Batches of one shape stacked by `group`; what is left over goes one by one."""
    if group == 1:
        yield Stretch(1, batches)
        return
    iterator = iter(batches)
    while taken := list(itertools.islice(iterator, group)):
        shapes = {tuple(np.shape(a) for a in tree.flatten(batch)) for batch in taken}
        if len(taken) == group and len(shapes) == 1:
            yield Stretch(group, [_stack(taken)])
        else:
            yield Stretch(1, taken)


def _stack(batches: Sequence[Batch]) -> Batch:
    arrays = [in_memory(batch) for batch in batches]
    stacked: Batch = tree.map_structure(lambda *a: None if a[0] is None else np.stack(a), *arrays)
    return stacked
