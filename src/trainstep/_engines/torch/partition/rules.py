"""PyTorch: rules for operations on single rows of a batch, and for sums over rows.

A rule gets an operation of the record with an input that is cut, and emits the operation for the
rows of one process; it returns None if it does not apply.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from trainstep._engines.shared.row_cuts import Cut
from trainstep._engines.torch.partition.partition import Partition, Rule, Value, aten

_SIZES = {"sym_size", "sym_numel"}
_SHAPED = {"zeros_like", "ones_like", "full_like", "empty_like"}  # they read no values
# Elementwise, though PyTorch does not tag them as pointwise.
_POINTWISE = {"clone", "_to_copy", "lift_fresh_copy", "alias", "detach", "copy", *_SHAPED}
# A pending sum can stay pending through these: they only move elements.
_MOVING = {"view", "_unsafe_view", "t", "transpose", "permute", "unsqueeze", "squeeze", "clone"}


def rule_of(target: Any) -> Rule:
    """Returns the rule for an operation."""
    schema = getattr(target, "_schema", None)
    return unknown if schema is None else _rule(target, schema.name.partition("::")[2])


@functools.cache
def _rule(target: Any, name: str) -> Rule:
    return _RULES.get(name, _pointwise if _is_pointwise(target, name) else unknown)


def _is_pointwise(target: Any, name: str) -> bool:
    if name in _POINTWISE or torch.Tag.pointwise in target.tags:
        return True
    plain = name[:-1] if name.endswith("_") and not name.startswith("_") else ""
    if plain in _POINTWISE:
        return True
    packet = getattr(aten, plain, None) if plain else None
    return packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )


def unknown(part: Partition, node: Any) -> Value | None:
    """No rule: the operation gets whole values."""
    return None


def keep_sum_pending(part: Partition, node: Any) -> Value | None:
    """Emits an operation on a pending sum, if it only moves elements or reads shapes."""
    schema = getattr(node.target, "_schema", None)
    name = "" if schema is None else schema.name.partition("::")[2]
    value = part.values[node.args[0]] if name in (*_MOVING, *_SHAPED, *_SIZES) else None
    if value is None or value.partial is not True:
        return None
    args, kwargs = fx.map_arg((node.args[1:], node.kwargs), part.whole_of)
    new = part.graph.call_function(node.target, (value.node, *args), kwargs)
    return part.summed(new, value) if name in _MOVING else Value(new)


def _pointwise(part: Partition, node: Any) -> Value | None:
    rank, given = part.shapes.rank(node), node.all_input_nodes
    found = next((each for each in given if part.settled(each).cut is not None), None)
    if found is None or rank is None:
        return None
    cut = _aligned(part, found, rank)
    if node.target._schema.is_mutable and part.cut_of(node.args[0]) is None:
        return None  # it updates a whole value in place

    def local(each: Any) -> Any:
        of_each = part.shapes.rank(each)
        if of_each is None:
            return part.whole_of(each)
        return part.cut(each, cut._replace(axis=cut.axis - rank + of_each))

    args, kwargs = fx.map_arg(node.args, local), fx.map_arg(node.kwargs, local)
    return Value(part.graph.call_function(node.target, args, kwargs), cut)


def _aligned(part: Partition, node: Any, rank: int) -> Cut:
    """Returns the cut of an operand, as a cut of the result that it is broadcast to."""
    axis, unit = part.values[node].cut
    return Cut(axis + rank - part.rank(node), unit)


# Sums ---------------------------------------------------------------------------------------------


def _sum(part: Partition, node: Any) -> Value | None:
    x, cut, dims, keep = _reduced(part, node)
    if cut.axis not in dims:
        return _of_rows(part, node, cut.without(dims, keep=keep))
    kwargs = {k: v for k, v in node.kwargs.items() if k == "dtype"}
    total = part.call(aten.sum.dim_IntList, part.values[x].node, list(dims), keep, **kwargs)
    if node.target._schema.name == "aten::sum":
        return part.summed(total)
    count = part.product(*(part.size(x, dim) for dim in dims))
    return part.summed(part.call(aten.div.Scalar, total, count))


def _reduced(part: Partition, node: Any) -> tuple[Any, Cut, tuple[int, ...], bool]:
    x = node.args[0]
    rank, cut = part.rank(x), part.settled(x).cut
    dims = node.args[1] if len(node.args) > 1 else None
    dims = [dims] if isinstance(dims, int) else dims
    every = tuple(d % rank for d in dims) if dims else tuple(range(rank))
    keep = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    return x, cut, every, keep


def _along(part: Partition, node: Any) -> Value | None:
    """An operation along other axes than the rows', with one or two results."""
    if len(node.args) < 2 and "dim" not in node.kwargs:
        return None
    _, cut, dims, keep = _reduced(part, node)
    if cut.axis in dims:
        return None
    several = len(node.target._schema.returns) > 1
    new = cut.without(dims, keep=keep)
    return _of_rows(part, node, [new, new] if several else new)


def _same_axes(part: Partition, node: Any) -> Value | None:
    """An operation along another axis than the rows', with results of the shape of the argument."""
    x = node.args[0]
    cut = part.settled(x).cut
    names = [argument.name for argument in node.target._schema.arguments]
    place = names.index("dim")
    dim = node.args[place] if place < len(node.args) else None
    if cut is None or dim is None or dim % part.rank(x) == cut.axis:
        return None
    others = [each for each in node.all_input_nodes if each is not x]
    if any(part.settled(each).cut != cut for each in others):
        return None
    several = len(node.target._schema.returns) > 1
    return _of_rows(part, node, [cut, cut] if several else cut)


def _of_rows(part: Partition, node: Any, cut: Any) -> Value:
    """Emits an operation on the rows of this process."""

    def local(each: Any) -> Any:
        return part.settled(each).node

    args, kwargs = fx.map_arg(node.args, local), fx.map_arg(node.kwargs, local)
    new = part.graph.call_function(node.target, args, kwargs)
    return Value(new, cut, [False] * len(cut) if isinstance(cut, list) else False)


# Products -----------------------------------------------------------------------------------------


def _mm(part: Partition, node: Any) -> Value | None:
    a, b = node.args
    left, right = part.settled(a).cut, part.settled(b).cut
    inner = left if left is not None and left.axis == 1 else None
    if inner is None and right is not None and right.axis == 0:
        inner = right
    if inner is not None:
        parts = part.cut(a, inner._replace(axis=1)), part.cut(b, inner._replace(axis=0))
        return part.summed(part.call(node.target, *parts))
    if left is not None:
        return Value(part.call(node.target, part.values[a].node, part.whole_of(b)), left)
    assert right is not None
    return Value(part.call(node.target, part.whole_of(a), part.values[b].node), right)


def _addmm(part: Partition, node: Any) -> Value | None:
    bias, a, b = node.args
    cut = part.settled(a).cut
    if node.kwargs or cut is None or cut.axis != 0:
        return None
    if part.settled(b).cut is not None or part.settled(bias).cut is not None:
        return None
    return _of_rows(part, node, cut)


def _bmm(part: Partition, node: Any) -> Value | None:
    cuts = [part.settled(each).cut for each in node.args]
    cut = next(each for each in cuts if each is not None)
    if cut.axis != 0:
        return None
    parts = [part.cut(each, cut) for each in node.args]
    return Value(part.call(node.target, *parts), cut)


# Shapes -------------------------------------------------------------------------------------------


def _view(part: Partition, node: Any) -> Value | None:
    x = node.args[0]
    value = part.settled(x)
    cut = part.shapes.reshaped(x, value.cut, node)
    shape = None if cut is None else _local(part, node, cut)
    if shape is None or -1 in shape:  # a part does not determine it
        return None
    return Value(part.call(node.target, value.node, shape), cut)


def _local(part: Partition, node: Any, cut: Cut) -> list[Any]:
    """Returns the shape of a result for the rows of this process."""
    known = [part.shapes.size(node, axis) for axis in range(part.rank(node))]
    return [
        part.local(cut)
        if axis == cut.axis
        else fx.map_arg(node.args[1][axis], part.whole_of)
        if size is None
        else size
        for axis, size in enumerate(known)
    ]


def _expand(part: Partition, node: Any) -> Value | None:
    x = node.args[0]
    value, cut = part.values[x], _aligned(part, x, part.rank(node))
    return Value(part.call(node.target, value.node, _local(part, node, cut)), cut)


def _permuted(part: Partition, node: Any) -> Value | None:
    x = node.args[0]
    cut, rank = part.settled(x).cut, part.rank(x)
    order = list(range(rank))
    name = node.target._schema.name
    if name == "aten::permute":
        order = [d % rank for d in node.args[1]]
    else:
        one, other = (0, 1) if name == "aten::t" else (d % rank for d in node.args[1:3])
        if rank > 1:
            order[one], order[other] = order[other], order[one]
    return _of_rows(part, node, cut._replace(axis=order.index(cut.axis)))


def _unsqueeze(part: Partition, node: Any) -> Value | None:
    cut, rank = part.settled(node.args[0]).cut, part.rank(node)
    at = node.args[1] % rank
    return _of_rows(part, node, cut._replace(axis=cut.axis + (at <= cut.axis)))


def _squeeze(part: Partition, node: Any) -> Value | None:
    x = node.args[0]
    cut, rank = part.settled(x).cut, part.rank(x)
    if len(node.args) < 2:
        return None
    dims = [node.args[1]] if isinstance(node.args[1], int) else node.args[1]
    gone = [d % rank for d in dims if part.shapes.size(x, d) == 1]
    if cut.axis in gone:
        return None
    # Explicit axes: an axis of a part may have size 1 where that of the whole has not.
    new = part.call(aten.squeeze.dims, part.values[x].node, gone)
    return Value(new, cut.without(gone))


def _select(part: Partition, node: Any) -> Value | None:
    x, dim = node.args[:2]
    cut, rank = part.settled(x).cut, part.rank(x)
    if dim % rank == cut.axis:
        return None
    return _of_rows(part, node, cut.without([dim % rank]))


def _slice(part: Partition, node: Any) -> Value | None:
    x = node.args[0]
    cut, dim = part.settled(x).cut, node.args[1] if len(node.args) > 1 else 0
    if dim % part.rank(x) == cut.axis:
        is_all = part.shapes.same(node, x) and not (part.is_dynamic and _is_limited(part, node))
        return Value(part.values[x].node, cut) if is_all else None
    return _of_rows(part, node, cut)


def _is_limited(part: Partition, node: Any) -> bool:
    """Whether a slice of all rows may be a slice of fewer, for larger batches."""
    start, stop = (*node.args[2:4], None, None)[:2]
    if isinstance(stop, fx.Node):
        return start not in (None, 0) or part.values[stop].node is not part.rows.total
    return start not in (None, 0) or (stop is not None and stop < sys.maxsize)


def _cat(part: Partition, node: Any) -> Value | None:
    given, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    first = next(each for each in given if part.settled(each).cut is not None)
    cut = part.values[first].cut
    stacks = node.target._schema.name == "aten::stack"
    dim %= part.rank(node)
    if dim == cut.axis and not stacks:
        return None
    parts = [part.cut(each, cut) for each in given]
    new = cut._replace(axis=cut.axis + (stacks and dim <= cut.axis))
    return Value(part.call(node.target, parts, dim), new)


def _unbind(part: Partition, node: Any) -> Value | None:
    x, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    cut, rank, count = part.settled(x).cut, part.rank(x), part.shapes.size(x, dim)
    if dim % rank == cut.axis or count is None:
        return None
    return _of_rows(part, node, [cut.without([dim % rank])] * count)


def _size(part: Partition, node: Any) -> Value | None:
    """Returns the size of the whole value."""
    x, *dims = node.args
    every = [d % part.rank(x) for d in dims] or range(part.rank(x))
    return Value(part.product(*(part.size(x, dim) for dim in every)))


# Layers -------------------------------------------------------------------------------------------


def _first_is_rows(part: Partition, node: Any, given: Sequence[int]) -> bool:
    """Whether exactly these arguments are cut, along their first axis."""
    for place, each in enumerate(node.args):
        if isinstance(each, fx.Node):
            cut = part.settled(each).cut
            if (cut is None or cut.axis != 0) if place in given else cut is not None:
                return False
    return True


def _layer(*given: int, outputs: str) -> Rule:
    """Returns a rule for an operation on rows; each result is rows ("r") or a sum ("s")."""

    def rule(part: Partition, node: Any) -> Value | None:
        if not _first_is_rows(part, node, given):
            return None
        cut = part.values[node.args[given[0]]].cut
        if outputs == "r":
            return _of_rows(part, node, cut)
        if outputs == "s":
            return part.summed(_of_rows(part, node, None).node)
        value = _of_rows(part, node, [cut if kind == "r" else None for kind in outputs])
        value.partial = [kind == "s" for kind in outputs]
        return value

    return rule


def _embedding(part: Partition, node: Any) -> Value | None:
    weights, indices = node.args[:2]
    if part.settled(weights).cut is not None:
        return None
    return _of_rows(part, node, part.settled(indices).cut)


_REDUCING = ("argmax", "argmin", "max", "min", "amax", "amin", "any", "all", "prod", "logsumexp")
_KEEPING = (
    *("cumsum", "sort", "topk", "gather"),
    *("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"),
)
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_SIZES, _size),
    "sum": _sum,
    "mean": _sum,
    **dict.fromkeys(_REDUCING, _along),
    **dict.fromkeys(_KEEPING, _same_axes),
    "mm": _mm,
    "addmm": _addmm,
    "bmm": _bmm,
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), _view),
    "expand": _expand,
    **dict.fromkeys(("t", "transpose", "permute"), _permuted),
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "select": _select,
    "slice": _slice,
    **dict.fromkeys(("cat", "stack"), _cat),
    "unbind": _unbind,
    "native_layer_norm": _layer(0, outputs="rrr"),
    "native_layer_norm_backward": _layer(0, 1, 3, 4, outputs="rss"),
    "convolution": _layer(0, outputs="r"),
    "convolution_backward": _layer(0, 1, outputs="rss"),
    "max_pool2d_with_indices": _layer(0, outputs="rr"),
    "max_pool2d_with_indices_backward": _layer(0, 1, 7, outputs="r"),
    "avg_pool2d": _layer(0, outputs="r"),
    "avg_pool2d_backward": _layer(0, 1, outputs="r"),
    "embedding": _embedding,
    "embedding_dense_backward": _layer(0, 1, outputs="s"),
}
