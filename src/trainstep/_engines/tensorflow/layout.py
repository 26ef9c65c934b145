"""TensorFlow: splits a batch over the devices of this process, and of other processes.

The step is recorded once, for the whole batch, and its graph is partitioned. Variables stay on the
first device of each process; their values are copied to the other devices in every step, and the
new values are computed once in each process.
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
from trainstep._engines.tensorflow.partition.shapes import Shapes, sample_sizes
from trainstep._engines.tensorflow.processes import Group, group


def layout(kind: str, devices: Sequence[Any] | None) -> Layout | None:
    """Returns the layout over devices of every process; None if there is one device."""
    if kind == "sharded":
        raise variables_are_whole("TensorFlow")
    own = _own()
    chosen = own if devices is None else [_named(each, own) for each in devices]
    return None if chosen == own[:1] and group() is None else Layout(chosen)


def _own() -> list[str]:
    """Returns the devices of this process: its GPUs, or else its logical CPUs."""
    job = group()
    task = "" if job is None else f"/task:{job.index}/"  # TensorFlow lists those of all processes
    found = [d for d in tf.config.list_logical_devices() if task in d.name]
    by_kind = {kind: [d.name for d in found if d.device_type == kind] for kind in ("GPU", "CPU")}
    return by_kind["GPU"] or by_kind["CPU"]


def _named(device: Any, known: Sequence[str]) -> str:
    """Returns the name of a device, given by its number, or by the end of its name."""
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
        outputs: The outputs of the step.
        new: The new values of the variables that it writes.
        effects: Operations that have to run before the assignments.
    """

    graph: Any
    given: Sequence[Tensor]
    outputs: Sequence[Tensor]
    new: Sequence[Tensor]
    effects: Sequence[Any]


class Layout:
    """Splits batches along their first axis; replicates variables in each process.

    Attributes:
        parts: The number of parts of a batch, one per device.
        processes: The number of processes that own the devices.
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

    def partition(
        self,
        record: Record,
        leaves: Sequence[Any],
        axes: Axes | None,
        commit: Callable[[Sequence[Tensor], Sequence[Any]], None],
        variables: Sequence[Variable],
    ) -> Any:
        """Returns the step as a function that runs on all devices of this process.

        Args:
            record: The step.
            leaves: The arguments that it was recorded with.
            axes: Their dynamic sizes.
            commit: Assigns the new values, after the outputs and other operations.
            variables: The variables that it reads and writes.
        """
        if self._group is not None:
            self._group.agree_on(variables)
        batch, count, _ = batch_of(leaves, axes)
        shapes = Shapes(record.graph, record.given, sample_sizes(leaves, axes, count))

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
                # With one row, a cut axis cannot be distinguished from one that is broadcast.
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
        """Wraps a program: if a collective fails, it raises a ProcessLostError."""
        if self._group is None:
            return run

        def guarded(leaves: Sequence[Any]) -> Sequence[Tensor]:
            try:
                return run(leaves)
            except _LOST_PROCESS as error:
                note_lost()
                raise ProcessLostError(str(error).splitlines()[0]) from error

        return guarded

    def assembled(
        self, shape: tuple[int, ...], axis: int, read: Callable[[tuple[slice, ...]], Any]
    ) -> Any:
        """Returns an array of a batch with only the rows of this process read; others are zero."""
        bounds = self._rows(shape[axis]).bounds
        return with_own_rows(shape, axis, bounds[0][0], bounds[-1][1], read)

    def joined(self, leaves: Sequence[Any] | None, last: Sequence[Any] | None) -> list[Any] | None:
        """Joins the rows of all processes into one batch; returns None if no process has any."""
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
        """Whether each process has exactly the rows of its part."""
        total, processes = sum(counts), self.processes
        bounds = [total * k // processes for k in range(processes + 1)]
        return [b - a for a, b in itertools.pairwise(bounds)] == list(counts)

    def agree(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the arrays of the first process, in every process."""
        assert self._group is not None
        return list(self._group.broadcast(list(arrays)))


def _as_is(own: Any, part: tuple[slice, ...]) -> Any:
    """Returns the rows of this process, which are already read."""
    return own


# The errors of a collective when a process has ended; the type depends on the layer that fails.
_LOST_PROCESS = (
    tf.errors.UnavailableError,
    tf.errors.InternalError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)
