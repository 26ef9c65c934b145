"""Where batches come from: arrays, data sets, loaders, generators; always `(x, y, weights)`.

A `Feed` yields the batches of an epoch in stretches: an iterable of single batches, or of stacks of
several, to be run in one call of the program. Long stretches keep the loop over them tight.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np
from keras import ops, tree

from trainstep import _engines
from trainstep._ahead import ahead
from trainstep._batch import check_dense, check_lengths, check_positive, is_several, unpacked
from trainstep._errors import ArgumentError
from trainstep._outputs import take_out
from trainstep._structure import like

Batch = tuple[Any, Any, Any]


class Stretch(NamedTuple):
    """Batches of an epoch, one after the other.

    Attributes:
        group: How many batches each of them is: 1, or those of a stack.
        batches: The batches.
        length: How many there are, if they are in memory: to look at one ahead of its turn then
            does nothing. 0: not known.
    """

    group: int
    batches: Iterable[Batch]
    length: int = 0


_AHEAD = 8  # chunks that there have to be for another thread to be worth its while
_CHUNK = 1 << 20  # bytes that are shuffled at once: a batch is then a slice, not a gather


class Feed(Protocol):
    """A source of batches."""

    steps: int | None  # in an epoch, if that is known

    def epoch(self, group: int) -> Iterator[Stretch]:
        """The batches of one epoch."""
        ...

    def restart(self) -> None:
        """Starts from the first batch again, where the source can."""
        ...

    def pass_over(self, epochs: int) -> None:
        """Leaves epochs out, where a later one depends on them."""
        ...


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
        if size < _AHEAD * _CHUNK or not engine.waits:
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


def all_of(stretches: Iterable[Stretch]) -> Iterator[Batch]:
    """What stretches have, one after the other."""
    return itertools.chain.from_iterable(stretch.batches for stretch in stretches)


def _chunks(count: int, step: int, most: int) -> Iterator[slice]:
    """Rows in chunks of 1, 8, 64, ... steps: the first is soon ready, and the others meanwhile."""
    start, steps = 0, 1
    while start < count:
        yield slice(start, start + step * steps)
        start += step * steps
        steps = max(1, min(8 * steps, most))


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


_END = object()


class Stretched(Stream):
    """Arrays in epochs of another length than theirs.

    Attributes:
        arrays: The arrays.
    """

    def __init__(self, arrays: Arrays, steps: int) -> None:
        super().__init__(arrays.batches, steps)
        self.arrays = arrays


def feed(
    x: Any,
    y: Any = None,
    weights: Any = None,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    shuffle: bool = False,
) -> Feed:
    """The feed of whatever a person may pass as data."""
    check_positive("Trainer", batch_size=batch_size, steps_per_epoch=steps)
    if not _is_source(x):
        arrays = Arrays((x, y, weights), batch_size, steps, shuffle)
        return arrays if steps in (None, arrays.steps) else Stretched(arrays, steps)
    if y is not None or weights is not None:
        raise ArgumentError(
            "Trainer",
            "y" if y is not None else "sample_weight",
            f"nothing besides a {type(x).__name__}, which yields (x, y, sample_weight) itself",
            f"a {type(y if y is not None else weights).__name__}",
            "let the data set yield the targets and weights",
        )
    if isinstance(x, keras.utils.PyDataset):
        return _PyDataset(x, steps, shuffle)
    if callable(x) and not hasattr(x, "__iter__"):
        return Stream(lambda: iter(x()), steps)
    if isinstance(x, Iterator):
        return Stream(lambda: x, steps)
    return Stream(lambda: iter(x), steps, _length(x))


def apart(x: Any, y: Any, weights: Any) -> Batch:
    """The same, with `(x, y)` and `(x, y, sample_weight)` in place of x taken apart."""
    if y is None and isinstance(x, tuple) and 2 <= len(x) <= 3 and not _is_source(x[0]):
        return unpacked(x)
    return x, y, weights


class _PyDataset(Stream):
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


def _is_source(x: Any) -> bool:
    """Whether `x` yields batches, rather than being an array or a structure of arrays."""
    if isinstance(x, (keras.utils.PyDataset, Iterator)):
        return True
    if isinstance(x, (list, tuple, dict)) or hasattr(x, "shape") or hasattr(x, "__array__"):
        return False
    return hasattr(x, "__iter__") or callable(x) or hasattr(x, "__getitem__")


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray)


def _length(x: Any) -> int | None:
    try:
        return len(x)
    except TypeError:  # a data set of unknown or infinite length
        return None


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


def split(batch: Batch, fraction: float) -> tuple[Batch, Batch]:
    """The first and the last part of arrays: for training and for validation."""
    if _is_source(batch[0]):
        raise ArgumentError(
            "Trainer.fit",
            "validation_split",
            "arrays, which can be cut",
            f"a {type(batch[0]).__name__}",
            "pass `validation_data`",
        )
    batch = in_memory(batch)
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
