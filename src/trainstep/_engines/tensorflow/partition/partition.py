"""TensorFlow: a recorded step made into parts, each the rows of one device.

The graph is written anew, operation by operation, inside another function. Each value is whole, or
cut along one axis: then every device of this process has a tensor of its own rows. An operation
that treats rows one by one is written once for each device; a sum over rows becomes a sum of sums.
What has no rule gets whole values, on the first device: right for every operation, if not cheap.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from trainstep._engines.contract import Tensor
from trainstep._engines.shared.row_cuts import Cut
from trainstep._engines.tensorflow.partition.shapes import Shapes

Size = Any  # an int, or an integer tensor
AddUp = Callable[[Sequence[Tensor]], list[Tensor]]


class Rows(NamedTuple):
    """The rows of a batch, and those of each device of this process."""

    total: Size
    bounds: list[tuple[Size, Size]]

    @classmethod
    def shared(cls, total: Size, parts: int, own: range) -> Rows:
        """As equal shares as there can be."""
        return cls(total, [(total * k // parts, total * (k + 1) // parts) for k in own])


class Unknown(Exception):
    """The shape of a value is not known, so whole values are taken."""


class Value:
    """What a tensor of the record has become.

    Attributes:
        tensors: One; or one for each device, if it is cut or partial.
        cut: How it is cut; None if it is not.
        partial: Whether the sum over all devices is still to be made.
    """

    def __init__(
        self, tensors: list[Tensor], cut: Cut | None = None, *, partial: bool = False
    ) -> None:
        self.tensors, self.cut, self.partial = tensors, cut, partial
        self.slices: dict[Cut, list[Tensor]] = {}


class Partition:
    """Goes through a record once, and writes the parts into the current graph.

    Args:
        shapes: What is known of the record's tensors.
        rows: The rows.
        devices: The devices of this process, by name.
        add_up: Makes the sums over all processes of tensors; None if there is one process.
    """

    def __init__(
        self, shapes: Shapes, rows: Rows, devices: Sequence[str], add_up: AddUp | None
    ) -> None:
        self.shapes, self.rows, self.devices = shapes, rows, devices
        self._add_up = add_up
        self._graph = tf.compat.v1.get_default_graph()
        self._values: dict[str, Value] = {}
        self._pending: list[Value] = []

    def write(
        self,
        graph: Any,
        arguments: dict[str, Value],
        wanted: Sequence[Tensor],
        effects: Sequence[Any],
    ) -> tuple[list[Tensor], list[Any]]:
        """Writes what is needed of a record.

        Args:
            graph: The record.
            arguments: Those of the record, by name.
            wanted: Tensors of it, which are made whole.
            effects: Operations of it that have to run.

        Returns:
            The tensors, and the operations.
        """
        from trainstep._engines.tensorflow.partition.rules import rule_of

        for function in graph._functions.values():
            self._graph._add_function_recursive(function)
        self._values.update(arguments)
        for outside, inside in graph.captures:
            self._values[inside.name] = Value([outside])
        done: list[Any] = []
        for op in _needed(graph, [*(tensor.op for tensor in wanted), *effects]):
            if op.type == "Placeholder":
                continue
            values = self._settled_axes(op)
            given = [self._values[x.name] for x in op.inputs]
            if values is None and any(value.cut or value.partial for value in given):
                with contextlib.suppress(Unknown):
                    values = rule_of(op.type)(self, op)
            if values is None:
                made = self.emit(op, [self.whole(x) for x in op.inputs])
                values = [Value([tensor]) for tensor in made.outputs]
                if op in effects:
                    done.append(made)
            for tensor, value in zip(op.outputs, values, strict=True):
                self._values[tensor.name] = value
        return [self.whole(tensor) for tensor in wanted], done

    def _settled_axes(self, op: Any) -> list[Value] | None:
        """The axes that a gradient is summed over, where they are the same for any size.

        With one row, TensorFlow would sum over the axis of the rows, too, which changes nothing
        there, and much in a part that has no rows.
        """
        if op.type != "BroadcastGradientArgs":
            return None
        axes = [self.shapes.value(tensor) for tensor in op.outputs]
        if None in axes:
            return None
        return [Value([tf.constant(each, op.outputs[0].dtype)]) for each in axes]

    # What rules use ---------------------------------------------------------------------------

    def cut_of(self, tensor: Tensor) -> Cut | None:
        """How a value is cut, its sum being made."""
        return self.settled(tensor).cut

    def settled(self, tensor: Tensor) -> Value:
        """A value whose sum has been made."""
        value = self._values[tensor.name]
        self._settle(value)
        return value

    def unsettled(self, tensor: Tensor) -> Value:
        """A value whose sum may still have to be made."""
        return self._values[tensor.name]

    def rank(self, tensor: Tensor) -> int | None:
        """How many axes a tensor has."""
        shape = self.shapes.shape(tensor)
        return None if shape is None else len(shape)

    def emit(self, op: Any, inputs: Sequence[Tensor], device: int = 0) -> Any:
        """Writes an operation of the record, on other inputs."""
        attributes = {k: v for k, v in op.node_def.attr.items() if k not in _PLACES}
        with tf.device(self.devices[device]):
            return self._graph._create_op_internal(
                op.type,
                list(inputs),
                [tensor.dtype.base_dtype for tensor in op.outputs],
                attrs=attributes,
                op_def=op.op_def,
            )

    def of_parts(
        self, op: Any, inputs: Callable[[int], Sequence[Tensor]], cuts: Sequence[Cut | None]
    ) -> list[Value] | None:
        """Writes an operation once for each device.

        Args:
            op: The operation.
            inputs: Those of a device.
            cuts: How each result is cut; None: it is to be added up.
        """
        for tensor, cut in zip(op.outputs, cuts, strict=True):
            if cut is not None and not self.shapes.is_cut(tensor, cut):
                return None
        made = [self.emit(op, inputs(k), k).outputs for k in range(len(self.devices))]
        return [
            Value(list(tensors), cut) if cut is not None else self.summed(self._of_any(tensors))
            for tensors, cut in zip(zip(*made, strict=True), cuts, strict=True)
        ]

    def _of_any(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """Sums over rows, 0 where there are none: some kernels leave then what was in memory."""
        if sums[0].op.type in _RIGHT_OF_NONE:
            return list(sums)
        return [
            tf.where(tf.greater(stop, start), total, tf.zeros_like(total))
            for total, (start, stop) in zip(sums, self.rows.bounds, strict=True)
        ]

    def on_rows(self, op: Any, cuts: Sequence[Cut | None]) -> list[Value] | None:
        """The same operation on the rows of each device, its inputs as they are cut."""
        return self.of_parts(op, lambda k: [self.own(x, k) for x in op.inputs], cuts)

    def own(self, tensor: Tensor, device: int) -> Tensor:
        """What a device has of a value."""
        value = self.settled(tensor)
        return value.tensors[device if value.cut else 0]

    def map(self, tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """What a function makes of the rows of each device."""
        found = []
        for device, own in zip(self.devices, self.settled(tensor).tensors, strict=True):
            with tf.device(device):
                found.append(fn(own))
        return found

    def along(self, tensor: Tensor, cut: Cut, device: int) -> Tensor:
        """What a device has of a value cut like this; one with nothing along the axis as it is."""
        value, shape = self.settled(tensor), self.shapes.shape(tensor)
        if value.cut == cut:
            return value.tensors[device]
        whole = self.whole(tensor)
        if shape is None:
            raise Unknown
        if cut.axis < 0 or shape[cut.axis] == 1:
            return whole
        if cut not in value.slices:
            value.slices[cut] = self.rows_of(whole, cut)
        return value.slices[cut][device]

    def rows_of(self, whole: Tensor, cut: Cut) -> list[Tensor]:
        """The rows of each device, of a whole tensor."""
        rank, unit = whole.shape.rank, cut.unit
        return [
            _narrow(whole, cut.axis, start * unit, (stop - start) * unit, rank)
            for start, stop in self.rows.bounds
        ]

    def local(self, shape: Tensor, cut: Cut, device: int) -> Tensor:
        """A shape, of the rows of one device."""
        start, stop = self.rows.bounds[device]
        return _with_entry(self.whole(shape), cut.axis, (stop - start) * cut.unit)

    def full_shape(self, tensor: Tensor, dtype: Any = tf.int32) -> Tensor:
        """The shape of the whole of a value."""
        value = self.settled(tensor)
        shape = tf.shape(value.tensors[0], dtype)
        if value.cut is None:
            return shape
        return _with_entry(shape, value.cut.axis, self.rows.total * value.cut.unit)

    def summed(self, tensors: list[Tensor], before: Value | None = None) -> Value:
        """Sums over the rows of each device, to be added up.

        Args:
            tensors: The sums.
            before: The same numbers, laid out otherwise, that nothing else may need.
        """
        value = Value(tensors, partial=True)
        self._pending.append(value)
        if before in self._pending:
            self._pending.remove(before)
        return value

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole of a value; rows of other devices are fetched, once."""
        value = self.settled(tensor)
        if value.cut is not None:
            with tf.device(self.devices[0]):
                value.tensors = [self._joined(value.tensors, value.cut)]
            value.cut = None
        return value.tensors[0]

    def _joined(self, tensors: list[Tensor], cut: Cut) -> Tensor:
        joined = tensors[0] if len(tensors) == 1 else tf.concat(tensors, cut.axis)
        if self._add_up is None:
            return joined
        # Rows of other processes are zero here, and the sum has them all.
        start, stop = self.rows.bounds[0][0] * cut.unit, self.rows.bounds[-1][1] * cut.unit
        around = [start, self.rows.total * cut.unit - stop]
        pads = [[0, 0]] * cut.axis + [around] + [[0, 0]] * (joined.shape.rank - cut.axis - 1)
        kind = joined.dtype
        sent = joined if kind in _ADDED else tf.cast(joined, tf.int64)
        (found,) = self._add_up([tf.pad(sent, pads)])
        return tf.cast(found, kind)

    def _settle(self, value: Value) -> None:
        """Makes all sums that are due, in one message, if this is one of them."""
        if not value.partial:
            return
        pending, self._pending = self._pending, []
        if value not in pending:
            pending.append(value)
        with tf.device(self.devices[0]):
            sums = [
                each.tensors[0] if len(each.tensors) == 1 else tf.add_n(each.tensors)
                for each in pending
            ]
            if self._add_up is not None:
                sums = self._add_up(sums)
        for each, total in zip(pending, sums, strict=True):
            each.tensors, each.partial = [total], False


Values = list[Value] | None
Rule = Callable[[Partition, Any], Values]
_PLACES = ("_class", "_output_shapes")  # where it was, and of what shape
_RIGHT_OF_NONE = ("Sum", "MatMul", "BatchMatMulV2", "Einsum")
_ADDED = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)


def _narrow(x: Tensor, axis: int, start: Size, size: Size, rank: int) -> Tensor:
    """A piece of a tensor along an axis."""
    begin, sizes = [0] * rank, [-1] * rank
    begin[axis], sizes[axis] = start, size
    return tf.slice(x, begin, sizes)


def _with_entry(shape: Tensor, axis: int, size: Size) -> Tensor:
    """A shape with another size at an axis."""
    return tf.concat([shape[:axis], [tf.cast(size, shape.dtype)], shape[axis + 1 :]], 0)


def _needed(graph: Any, ops: Sequence[Any]) -> list[Any]:
    """Operations, and all that they take, each after what it takes.

    That is not always the order of the graph: the gradient of a loop adds to what the loop takes.
    """
    found: dict[Any, None] = {}
    rest = list(reversed(ops))
    while rest:
        op = rest.pop()
        if op in found:
            continue
        missing = [x.op for x in op.inputs if x.op not in found]
        if missing:
            rest += [op, *missing]
        else:
            found[op] = None
    place = {op: index for index, op in enumerate(graph.get_operations())}
    is_ordered = all(place[x.op] < place[op] for op in found for x in op.inputs)
    return sorted(found, key=place.__getitem__) if is_ordered else list(found)
