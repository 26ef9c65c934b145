"""TensorFlow: a batch over the devices of this process, and of others.

The step is recorded once, for the whole batch, and its graph is written anew in parts. Variables
are where they were, on the first device of each process; what a device needs of them goes there in
every step, and the new values are computed once in each process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from trainstep._common.errors import ArgumentError, ProcessLostError, variables_are_whole
from trainstep._engines.contract import Axes, Executable, Tensor, Variable
from trainstep._engines.shared.heartbeat import note_lost
from trainstep._engines.shared.row_cuts import Cut, batch_of, with_own_rows
from trainstep._engines.tensorflow.partition.partition import Partition, Rows, Value
from trainstep._engines.tensorflow.partition.shapes import Shapes, looks
from trainstep._engines.tensorflow.processes import Group, group


def layout(kind: str, devices: Sequence[Any] | None) -> Layout | None:
    """The layout over some devices of this process, and as many of each other; None if one."""
    if kind == "sharded":
        raise variables_are_whole("TensorFlow")
    own = _own()
    chosen = own if devices is None else [_named(each, own) for each in devices]
    return None if chosen == own[:1] and group() is None else Layout(chosen)


def _own() -> list[str]:
    """The devices of this process: its accelerators, or else the parts of its processor."""
    job = group()
    task = "" if job is None else f"/task:{job.index}/"  # TensorFlow knows those of all processes
    found = [d for d in tf.config.list_logical_devices() if task in d.name]
    by_kind = {kind: [d.name for d in found if d.device_type == kind] for kind in ("GPU", "CPU")}
    return by_kind["GPU"] or by_kind["CPU"]


def _named(device: Any, known: Sequence[str]) -> str:
    """The name of a device that is given by number, or by a part of its name."""
    name = getattr(device, "name", device)
    if isinstance(name, int) and 0 <= name < len(known):
        return known[name]
    found = [each for each in known if isinstance(name, str) and each.endswith(name.upper())]
    if len(found) != 1:
        raise ArgumentError(
            "Mirrored",
            "devices",
            f"numbers below {len(known)}, or names of these: {', '.join(known)}",
            repr(device),
            "pass None for all of them, or make more with "
            "`tf.config.set_logical_device_configuration`",
        )
    return found[0]


@dataclass(frozen=True)
class Record:
    """A recorded step: a graph without assignments.

    Attributes:
        graph: The graph.
        given: The placeholders of its arguments.
        outputs: What the step returns.
        new: The new values of the variables that it writes.
        effects: Operations that have to run before those are assigned.
    """

    graph: Any
    given: Sequence[Tensor]
    outputs: Sequence[Tensor]
    new: Sequence[Tensor]
    effects: Sequence[Any]


class Layout:
    """Batches cut along their first axis; variables whole in each process.

    Attributes:
        parts: How many devices a batch is cut for.
        processes: How many processes they belong to.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = list(devices)
        self._group: Group | None = group()
        self.processes = 1 if self._group is None else self._group.count
        self._index = 0 if self._group is None else self._group.index
        self.parts = len(self._devices) * self.processes

    def _rows(self, total: Any) -> Rows:
        each = len(self._devices)
        return Rows.shared(total, self.parts, range(self._index * each, (self._index + 1) * each))

    def spread(
        self,
        record: Record,
        leaves: Sequence[Any],
        axes: Axes | None,
        commit: Callable[[Sequence[Tensor], Sequence[Any]], None],
        variables: Sequence[Variable],
    ) -> Any:
        """The step, as a function of all devices of this process.

        Args:
            record: The step.
            leaves: The arguments that it was recorded with.
            axes: Those of their sizes that vary.
            commit: Assigns the new values, after the outputs and other operations.
            variables: What it reads and writes.
        """
        if self._group is not None:
            self._group.agree_on(variables)
        batch, count, _ = batch_of(leaves, axes)
        shapes = Shapes(record.graph, record.given, looks(leaves, axes, count))

        def parts(*tensors: Tensor) -> list[Tensor]:
            first = next((x for x, is_batch in zip(tensors, batch, strict=True) if is_batch), None)
            total: Any = 0 if first is None else first.shape[0]
            if total is None:
                total = tf.shape(first)[0]
            rows, add_up = self._rows(total), None if self._group is None else self._group.add_up
            part = Partition(shapes, rows, self._devices, add_up)
            given = {}
            for placeholder, x, is_batch in zip(record.given, tensors, batch, strict=True):
                given[placeholder.name] = value = Value([x])
                # Of one row, it cannot be told what is broadcast and what is not.
                if is_batch and shapes.rows != 1:
                    value.cut = Cut(0)
                    value.tensors = part.rows_of(x, value.cut)
            wanted = [*record.outputs, *record.new]
            found, effects = part.write(record.graph, given, wanted, record.effects)
            outputs, new = found[: len(record.outputs)], found[len(record.outputs) :]
            commit(new, [*outputs, *effects])
            return outputs

        specs = [tf.TensorSpec(x.shape, x.dtype) for x in record.given]
        return tf.function(parts, autograph=False).get_concrete_function(*specs)

    def guarded(self, run: Executable) -> Executable:
        """The program, whose failure may be that another process is gone."""
        if self._group is None:
            return run

        def guarded(leaves: Sequence[Any]) -> Sequence[Tensor]:
            try:
                return run(leaves)
            except _GONE as error:
                note_lost()
                raise ProcessLostError(str(error).splitlines()[0]) from error

        return guarded

    def assembled(
        self, shape: tuple[int, ...], axis: int, read: Callable[[tuple[slice, ...]], Any]
    ) -> Any:
        """An array of a batch, of which this process reads its own rows; the others are zero."""
        bounds = self._rows(shape[axis]).bounds
        return with_own_rows(shape, axis, bounds[0][0], bounds[-1][1], read)

    def joined(self, leaves: Sequence[Any] | None, last: Sequence[Any] | None) -> list[Any] | None:
        """The arrays of a batch, of the rows that each process has; None if no process has any."""
        assert self._group is not None
        counts = self._group.all_gather(None if leaves is None else len(leaves[0]))
        if all(count is None for count in counts):
            return None
        if leaves is not None and None not in counts and self._are_shares(counts):
            rows = sum(counts)
            return [self.assembled((rows, *x.shape[1:]), 0, partial(_as_is, x)) for x in leaves]
        found = [each for each in self._group.all_gather(leaves) if each is not None]
        return [np.concatenate(parts) for parts in zip(*found, strict=True)]

    def _are_shares(self, counts: Sequence[int]) -> bool:
        """Whether each process has just the rows that it would get."""
        total, processes = sum(counts), self.processes
        bounds = [total * k // processes for k in range(processes + 1)]
        return [b - a for a, b in itertools.pairwise(bounds)] == list(counts)

    def agree(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays of the first process, in all of them."""
        assert self._group is not None
        return list(self._group.broadcast(list(arrays)))


def _as_is(own: Any, part: tuple[slice, ...]) -> Any:
    """The rows of this process, when asked for them."""
    return own


# What a collective raises when a process has ended, whichever is first to notice.
_GONE = (
    tf.errors.UnavailableError,
    tf.errors.InternalError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)
