"""TensorFlow: rules for operations that change shapes, and for slices.

See `tensorflow/partition/rules.py` for the others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from trainstep._engines.contract import Tensor
from trainstep._engines.tensorflow.partition.partition import Partition, Rule, Value, Values


def keeping_sums_pending(rule: Rule) -> Rule:
    """Wraps the rule of an operation that only moves elements: a pending sum stays pending."""

    @functools.wraps(rule)
    def keeping_sums_pending(part: Partition, op: Any) -> Values:
        value, *others = map(part.unsettled, op.inputs)
        if not value.partial or any(other.cut or other.partial for other in others):
            return rule(part, op)
        rest = [other.tensors[0] for other in others]
        made = [part.emit(op, [x, *rest], k).outputs[0] for k, x in enumerate(value.tensors)]
        return [part.summed(made, value)]

    return keeping_sums_pending


def first_cut(part: Partition, inputs: Sequence[Tensor]) -> Tensor | None:
    return next((x for x in inputs if part.cut_of(x) is not None), None)


def _shape(part: Partition, op: Any) -> Values:
    kind = op.outputs[0].dtype
    shapes = [part.full_shape(x, kind) for x in op.inputs]
    if op.type == "Size":
        return [Value([tf.reduce_prod(shapes[0])])]
    if op.type == "Rank":
        return [Value([tf.size(shapes[0])])]
    return [Value([shape]) for shape in shapes]


def _reshape(part: Partition, op: Any) -> Values:
    x, shape = op.inputs
    value = part.settled(x)
    cut = None if value.cut is None else part.shapes.reshaped(x, value.cut, op.outputs[0])
    if cut is None or part.cut_of(shape):
        return None
    return part.of_parts(op, lambda k: [value.tensors[k], part.local(shape, cut, k)], [cut])


def _broadcast(part: Partition, op: Any) -> Values:
    x, shape = op.inputs
    value, ranks = part.settled(x), (part.rank(x), part.rank(op.outputs[0]))
    if value.cut is None or None in ranks:
        return None
    cut = value.cut._replace(axis=value.cut.axis + int(ranks[1] or 0) - int(ranks[0] or 0))
    return part.of_parts(op, lambda k: [value.tensors[k], part.local(shape, cut, k)], [cut])


def _expand(part: Partition, op: Any) -> Values:
    x, axis = op.inputs[0], part.shapes.value(op.inputs[1])
    cut, rank = part.cut_of(x), part.rank(op.outputs[0])
    if cut is None or rank is None or axis is None:
        return None
    axis = (axis[0] if isinstance(axis, list) else axis) % rank
    return part.on_rows(op, [cut._replace(axis=cut.axis + (axis <= cut.axis))])


def _squeeze(part: Partition, op: Any) -> Values:
    x = op.inputs[0]
    cut, shape = part.cut_of(x), part.shapes.shape(x)
    if cut is None or shape is None:
        return None
    axes = [axis % len(shape) for axis in op.node_def.attr["squeeze_dims"].list.i]
    gone = axes or [axis for axis, size in enumerate(shape) if size == 1]
    if cut.axis in gone:
        return None
    # Explicit axes: an axis of a part may have size 1 where that of the whole has not.
    return [Value(part.map(x, lambda tensor: tf.squeeze(tensor, gone)), cut.without(gone))]


def _transpose(part: Partition, op: Any) -> Values:
    cut, order = part.cut_of(op.inputs[0]), part.shapes.value(op.inputs[1])
    if cut is None or order is None:
        return None
    return part.on_rows(op, [cut._replace(axis=order.index(cut.axis))])


def _tile(part: Partition, op: Any) -> Values:
    cut, times = part.cut_of(op.inputs[0]), part.shapes.value(op.inputs[1])
    if cut is None or times is None or times[cut.axis] != 1:
        return None
    return part.on_rows(op, [cut])


def _pad(part: Partition, op: Any) -> Values:
    cut, pads = part.cut_of(op.inputs[0]), part.shapes.value(op.inputs[1])
    if cut is None or pads is None or any(pads[cut.axis]):
        return None
    return part.on_rows(op, [cut])


def _concat(part: Partition, op: Any) -> Values:
    *given, axis = op.inputs
    found, at, rank = first_cut(part, given), part.shapes.value(axis), part.rank(op.outputs[0])
    cut = None if found is None else part.cut_of(found)
    if cut is None or at is None or rank is None or at % rank == cut.axis:
        return None
    last = part.whole(axis)
    return part.of_parts(op, lambda k: [*(part.along(x, cut, k) for x in given), last], [cut])


def _pack(part: Partition, op: Any) -> Values:
    found, rank = first_cut(part, op.inputs), part.rank(op.outputs[0])
    cut = None if found is None else part.cut_of(found)
    if cut is None or rank is None:
        return None
    axis = op.node_def.attr["axis"].i % rank
    new = cut._replace(axis=cut.axis + (axis <= cut.axis))
    return part.of_parts(op, lambda k: [part.along(x, cut, k) for x in op.inputs], [new])


def _unpack(part: Partition, op: Any) -> Values:
    cut, rank = part.cut_of(op.inputs[0]), part.rank(op.inputs[0])
    if cut is None or rank is None:
        return None
    axis = op.node_def.attr["axis"].i % rank
    if axis == cut.axis:
        return None
    return part.on_rows(op, [cut.without([axis])] * len(op.outputs))


def _split(part: Partition, op: Any) -> Values:
    x, at = (op.inputs[1], op.inputs[0]) if op.type == "Split" else (op.inputs[0], op.inputs[2])
    cut, axis, rank = part.cut_of(x), part.shapes.value(at), part.rank(x)
    if cut is None or axis is None or rank is None:
        return None
    axis = (axis[0] if isinstance(axis, list) else axis) % rank
    return None if axis == cut.axis else part.on_rows(op, [cut] * len(op.outputs))


# Slices -------------------------------------------------------------------------------------------


def _taken(part: Partition, op: Any, given: Sequence[Tensor], rank: int) -> dict[int, int] | None:
    """Returns the axes that a slice keeps whole, with their places in the result."""
    begin, end, strides = map(part.shapes.value, given)
    if begin is None or end is None or strides is None:
        return None
    masks = {name: op.node_def.attr[f"{name}_mask"].i for name in _MASKS}

    def has(name: str, place: int) -> bool:
        return bool(masks[name] >> place & 1)

    explicit = sum(not has("ellipsis", p) and not has("new_axis", p) for p in range(len(begin)))
    found: dict[int, int] = {}
    axis = at = 0
    for place in range(len(begin)):
        if has("ellipsis", place):
            for _ in range(rank - explicit):
                found[axis] = at
                axis, at = axis + 1, at + 1
        elif has("new_axis", place):
            at += 1
        elif has("shrink_axis", place):
            axis += 1
        else:
            if has("begin", place) and has("end", place) and strides[place] == 1:
                found[axis] = at
            axis, at = axis + 1, at + 1
    for rest in range(axis, rank):
        found[rest] = at + rest - axis
    return found


_MASKS = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")


def _strided(part: Partition, op: Any) -> Values:
    x, *given = op.inputs
    cut, rank = part.cut_of(x), part.rank(x)
    axes = None if rank is None else _taken(part, op, given, rank)
    if cut is None or axes is None or cut.axis not in axes:
        return None
    return part.on_rows(op, [cut._replace(axis=axes[cut.axis])])


def _strided_grad(part: Partition, op: Any) -> Values:
    shape, begin, end, strides, x = op.inputs
    cut, rank = part.cut_of(x), part.rank(op.outputs[0])
    axes = None if rank is None else _taken(part, op, [begin, end, strides], rank)
    if cut is None or axes is None or part.cut_of(shape):
        return None
    before = next((axis for axis, at in axes.items() if at == cut.axis), None)
    if before is None:
        return None
    new = cut._replace(axis=before)
    others = [part.whole(each) for each in (begin, end, strides)]
    return part.of_parts(op, lambda k: [part.local(shape, new, k), *others, part.own(x, k)], [new])


def _slice(part: Partition, op: Any) -> Values:
    x, begin, size = op.inputs
    cut, start = part.cut_of(x), part.shapes.value(begin)
    if cut is None or start is None or start[cut.axis] != 0:
        return None
    first = part.whole(begin)  # all rows, if the result has as many
    return part.of_parts(op, lambda k: [part.own(x, k), first, part.local(size, cut, k)], [cut])


SHAPES: dict[str, Rule] = {
    **dict.fromkeys(("Shape", "ShapeN", "Size", "Rank"), _shape),
    "Reshape": keeping_sums_pending(_reshape),
    "BroadcastTo": _broadcast,
    "ExpandDims": keeping_sums_pending(_expand),
    "Squeeze": keeping_sums_pending(_squeeze),
    "Transpose": keeping_sums_pending(_transpose),
    "Tile": _tile,
    **dict.fromkeys(("Pad", "PadV2", "MirrorPad", "MirrorPadGrad"), _pad),
    "ConcatV2": _concat,
    "Pack": _pack,
    "Unpack": _unpack,
    **dict.fromkeys(("Split", "SplitV"), _split),
    "StridedSlice": _strided,
    "StridedSliceGrad": _strided_grad,
    "Slice": _slice,
}
