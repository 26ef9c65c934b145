"""TensorFlow: partitions a recorded step; each part computes the rows of one device.

The graph is rewritten, operation by operation, inside another function. Each value is whole, or cut
along one axis: then every device of this process has a tensor of its own rows. An operation on
single rows is emitted once for each device; a sum over rows becomes a sum of sums. An operation
without a rule gets whole values, on the first device: correct for every operation, but slow.
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
        """Splits the rows as evenly as possible."""
        return cls(total, [(total * k // parts, total * (k + 1) // parts) for k in own])


class UnknownShape(Exception):
    """The shape of a value is unknown, so whole values are used."""


class Value:
    """A tensor of the record, in the new graph.

    Attributes:
        tensors: One tensor; or one for each device, if it is cut or partial.
        cut: The cut; None if it is not cut.
        partial: Whether the sum over all devices is still pending.
    """

    def __init__(
        self, tensors: list[Tensor], cut: Cut | None = None, *, partial: bool = False
    ) -> None:
        self.tensors, self.cut, self.partial = tensors, cut, partial
        self.slices: dict[Cut, list[Tensor]] = {}


class Partition:
    """Emits the parts of a record into the current graph, in one pass.

    Args:
        shapes: The shapes of the record's tensors.
        rows: The rows.
        devices: The names of the devices of this process.
        add_up: Sums tensors over all processes; None if there is one process.
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
        """Emits the operations of a record that `wanted` and `effects` depend on.

        Args:
            graph: The record.
            arguments: The arguments of the record, by name.
            wanted: Tensors of the record; they are returned whole.
            effects: Operations of the record that have to run.

        Returns:
            The wanted tensors, and the emitted effects.
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
            values = self._constant_axes(op)
            given = [self._values[x.name] for x in op.inputs]
            if values is None and any(value.cut or value.partial for value in given):
                with contextlib.suppress(UnknownShape):
                    values = rule_of(op.type)(self, op)
            if values is None:
                made = self.emit(op, [self.whole(x) for x in op.inputs])
                values = [Value([tensor]) for tensor in made.outputs]
                if op in effects:
                    done.append(made)
            for tensor, value in zip(op.outputs, values, strict=True):
                self._values[tensor.name] = value
        return [self.whole(tensor) for tensor in wanted], done

    def _constant_axes(self, op: Any) -> list[Value] | None:
        """Returns the axes that a gradient is summed over, if they are the same for all sizes.

        With one row, TensorFlow would also sum over the axis of the rows. That is harmless for the
        whole batch, but wrong in a part without rows.
        """
        if op.type != "BroadcastGradientArgs":
            return None
        axes = [self.shapes.value(tensor) for tensor in op.outputs]
        if None in axes:
            return None
        return [Value([tf.constant(each, op.outputs[0].dtype)]) for each in axes]

    # Used by rules ----------------------------------------------------------------------------

    def cut_of(self, tensor: Tensor) -> Cut | None:
        """Returns the cut of a value, after its pending sum."""
        return self.settled(tensor).cut

    def settled(self, tensor: Tensor) -> Value:
        """Returns a value after its pending sum."""
        value = self._values[tensor.name]
        self._settle(value)
        return value

    def unsettled(self, tensor: Tensor) -> Value:
        """Returns a value whose sum may still be pending."""
        return self._values[tensor.name]

    def rank(self, tensor: Tensor) -> int | None:
        """Returns the number of axes of a tensor; None if unknown."""
        shape = self.shapes.shape(tensor)
        return None if shape is None else len(shape)

    def emit(self, op: Any, inputs: Sequence[Tensor], device: int = 0) -> Any:
        """Emits an operation of the record, with other inputs."""
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
        """Emits an operation once for each device.

        Args:
            op: The operation.
            inputs: Returns the inputs on a device.
            cuts: The cut of each result; None: the results are to be summed.
        """
        for tensor, cut in zip(op.outputs, cuts, strict=True):
            if cut is not None and not self.shapes.is_cut(tensor, cut):
                return None
        made = [self.emit(op, inputs(k), k).outputs for k in range(len(self.devices))]
        return [
            Value(list(tensors), cut)
            if cut is not None
            else self.summed(self._zero_if_empty(tensors))
            for tensors, cut in zip(zip(*made, strict=True), cuts, strict=True)
        ]

    def _zero_if_empty(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """Makes sums over no rows zero: some kernels return uninitialized memory for them."""
        if sums[0].op.type in _ZERO_IF_EMPTY:
            return list(sums)
        return [
            tf.where(tf.greater(stop, start), total, tf.zeros_like(total))
            for total, (start, stop) in zip(sums, self.rows.bounds, strict=True)
        ]

    def on_rows(self, op: Any, cuts: Sequence[Cut | None]) -> list[Value] | None:
        """Emits an operation on the rows of each device, with inputs as they are cut."""
        return self.of_parts(op, lambda k: [self.own(x, k) for x in op.inputs], cuts)

    def own(self, tensor: Tensor, device: int) -> Tensor:
        """Returns the part of a value on a device."""
        value = self.settled(tensor)
        return value.tensors[device if value.cut else 0]

    def map(self, tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Applies a function to the rows of each device."""
        found = []
        for device, own in zip(self.devices, self.settled(tensor).tensors, strict=True):
            with tf.device(device):
                found.append(fn(own))
        return found

    def along(self, tensor: Tensor, cut: Cut, device: int) -> Tensor:
        """Returns the part of a value on a device, for a cut; the whole if broadcast there."""
        value, shape = self.settled(tensor), self.shapes.shape(tensor)
        if value.cut == cut:
            return value.tensors[device]
        whole = self.whole(tensor)
        if shape is None:
            raise UnknownShape
        if cut.axis < 0 or shape[cut.axis] == 1:
            return whole
        if cut not in value.slices:
            value.slices[cut] = self.rows_of(whole, cut)
        return value.slices[cut][device]

    def rows_of(self, whole: Tensor, cut: Cut) -> list[Tensor]:
        """Splits a whole tensor into the rows of each device."""
        rank, unit = whole.shape.rank, cut.unit
        return [
            _narrow(whole, cut.axis, start * unit, (stop - start) * unit, rank)
            for start, stop in self.rows.bounds
        ]

    def local(self, shape: Tensor, cut: Cut, device: int) -> Tensor:
        """Returns a shape for the rows of one device."""
        start, stop = self.rows.bounds[device]
        return _with_entry(self.whole(shape), cut.axis, (stop - start) * cut.unit)

    def full_shape(self, tensor: Tensor, dtype: Any = tf.int32) -> Tensor:
        """Returns the shape of a whole value."""
        value = self.settled(tensor)
        shape = tf.shape(value.tensors[0], dtype)
        if value.cut is None:
            return shape
        return _with_entry(shape, value.cut.axis, self.rows.total * value.cut.unit)

    def summed(self, tensors: list[Tensor], before: Value | None = None) -> Value:
        """Returns a value whose sum over devices is pending.

        Args:
            tensors: The sum over the rows of each device.
            before: The same value in another shape, which may have no other readers.
        """
        value = Value(tensors, partial=True)
        self._pending.append(value)
        if before in self._pending:
            self._pending.remove(before)
        return value

    def whole(self, tensor: Tensor) -> Tensor:
        """Returns a whole value; fetches the rows of other devices once."""
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
        # Padded with zeros for rows of other processes, so the sum is a concatenation.
        start, stop = self.rows.bounds[0][0] * cut.unit, self.rows.bounds[-1][1] * cut.unit
        around = [start, self.rows.total * cut.unit - stop]
        pads = [[0, 0]] * cut.axis + [around] + [[0, 0]] * (joined.shape.rank - cut.axis - 1)
        kind = joined.dtype
        sent = joined if kind in _SUMMABLE else tf.cast(joined, tf.int64)
        (found,) = self._add_up([tf.pad(sent, pads)])
        return tf.cast(found, kind)

    def _settle(self, value: Value) -> None:
        """Computes all pending sums in one message, if this value is one of them."""
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
_PLACES = ("_class", "_output_shapes")  # the old colocation and shapes
_ZERO_IF_EMPTY = ("Sum", "MatMul", "BatchMatMulV2", "Einsum")
_SUMMABLE = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)


def _narrow(x: Tensor, axis: int, start: Size, size: Size, rank: int) -> Tensor:
    """Returns a slice of a tensor along an axis."""
    begin, sizes = [0] * rank, [-1] * rank
    begin[axis], sizes[axis] = start, size
    return tf.slice(x, begin, sizes)


def _with_entry(shape: Tensor, axis: int, size: Size) -> Tensor:
    """Returns a shape with another size for one axis."""
    return tf.concat([shape[:axis], [tf.cast(size, shape.dtype)], shape[axis + 1 :]], 0)


def _needed(graph: Any, ops: Sequence[Any]) -> list[Any]:
    """Returns operations and all their dependencies, in topological order.

    The graph's own order may differ: the gradient of a loop adds inputs to the loop.
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
