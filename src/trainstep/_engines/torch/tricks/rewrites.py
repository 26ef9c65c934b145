"""torch: parts of a recorded step, replaced by others that run faster on a CPU.

    graph --where images lie: for every way to run it--> graph --for inductor alone--> graph

Keras writes its layers for images whose channels come last, and asks torch for copies that it can
do without. Inductor writes good loops for most operations and bad ones for a few. A rule knows one
such form, gives the same numbers, and where it is not sure it leaves the graph alone.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from trainstep._engines.torch.tricks.forget_sources import forgotten
from trainstep._engines.torch.tricks.graph_facts import example, stand_in

_aten = torch.ops.aten
_pool = _aten.max_pool2d_with_indices
_gradient = _aten.max_pool2d_with_indices_backward
_MUCH = 64  # times as many elements


def rewritten(module: GraphModule) -> GraphModule:
    """A copy of a recorded step that inductor compiles to faster loops."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    _pool_by_torch(graph)
    _pad_in_order(graph)
    _compute_small_ones_once(graph)
    return forgotten(GraphModule(module, graph))


# Max pooling ----------------------------------------------------------------------------------
# Keras puts the channels first and copies, which torch's kernel does not need, and which leads it
# to its slow form. Inductor has no kernel for the gradient: it finds the maxima again, element by
# element, and scatters. Torch's own kernels are hidden from it in operations of ours.


def pool_where_images_lie(graph: Graph) -> None:
    """Takes out the copies before max pooling, where nobody sees how memory lies after it."""
    for node in list(graph.nodes):
        if node.target is not _pool.default:
            continue
        copy = node.args[0]
        if copy is node.prev and copy.target is _aten.clone.default and _is_turned(copy.args[0]):
            others = [user for user in copy.users if user is not node]
            pooled = all(user.target is _gradient.default for user in others)
            if pooled and _is_unseen(copy, copy.args[0]):
                copy.replace_all_uses_with(copy.args[0])
    graph.eliminate_dead_code()


def _is_turned(node: Node) -> bool:
    """Whether this is the view, with channels first, of an image whose channels come last."""
    return node.target is _aten.permute.default and node.args[1] == [0, 3, 1, 2]


def _is_unseen(node: Node, other: Node) -> bool:
    """Whether another node, of the same numbers, can take the place of one.

    Values that follow lie otherwise in memory then. That must end before the outputs, in
    operations that only compute: torch has recorded some others for the memory that it saw.
    """
    with FakeTensorMode():
        moved: dict[Node, Any] = {node: stand_in(example(other))}
        for user in _behind(node):
            if not any(given in moved for given in user.all_input_nodes):
                continue
            if not _only_computes(user):
                return False
            try:
                value = _run(user, moved)
            except Exception:  # a view that is none any more, or what cannot run on stand-ins
                return False
            if _strides(value) != _strides(example(user)):
                moved[user] = value
    return True


def _behind(node: Node) -> Iterator[Node]:
    while node.next.op != "root":
        node = node.next
        yield node


def _only_computes(node: Node) -> bool:
    """Whether an operation gives the same numbers, however its operands lie in memory."""
    target = node.target
    if target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target is _aten.as_strided.default:
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:  # draws fill memory in its order
        return False
    return target.is_view or torch.Tag.pointwise in target.tags or target in _COMPUTING


_COMPUTING = {
    _aten.clone.default,
    _aten.convolution.default,
    _aten.convolution_backward.default,
    _pool.default,
    _gradient.default,
    _aten.amax.default,
    _aten.cat.default,
    _aten.mean.default,
    _aten.mean.dim,
    _aten.sum.default,
    _aten.sum.dim_IntList,
    _aten._to_copy.default,
}


def _run(node: Node, moved: dict[Node, Any]) -> Any:
    def given(of: Node) -> Any:
        return moved[of] if of in moved else stand_in(example(of))

    return node.target(*map_arg(node.args, given), **map_arg(node.kwargs, given))


def _strides(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return list(map(_strides, value))
    return value.stride() if isinstance(value, torch.Tensor) else None


def _pool_by_torch(graph: Graph) -> None:
    for node in list(graph.nodes):
        if node.target is not _pool.default:
            continue
        image = node.args[0]
        if _is_turned(image) and example(image).device.type == "cpu":
            node.target = torch.ops.trainstep.max_pool.default
            for places in (user for user in node.users if user.args[1] == 1):
                for user in places.users:
                    if user.target is _gradient.default:
                        user.target = torch.ops.trainstep.max_pool_gradient.default


def _pad_in_order(graph: Graph) -> None:
    """Before a pooling that pads, Keras repeats the border; the gradient of that gets plain memory.

    Inductor hands it whatever memory there is, and expects a result that lies as for plain one.
    """
    for node in list(graph.nodes):
        if node.target in _PADDING_GRADIENTS:
            plain = [
                _in_memory(given, torch.empty(example(given).shape, device="meta").stride())
                for given in node.args[:2]
            ]
            node.args = (*plain, *node.args[2:])


_PADDING_GRADIENTS = {
    _aten.replication_pad1d_backward.default,
    _aten.replication_pad2d_backward.default,
    _aten.replication_pad3d_backward.default,
}

_library = torch.library.Library("trainstep", "FRAGMENT")
_SETTINGS = "int[2] size, int[2] stride=[], int[2] padding=0, int[2] dilation=1, bool ceil=False"
_library.define(f"max_pool(Tensor x, {_SETTINGS}) -> (Tensor, Tensor)")
_library.define(
    "max_pool_gradient(Tensor slope, Tensor x, int[2] size, int[2] stride, int[2] padding, "
    "int[2] dilation, bool ceil, Tensor places) -> Tensor"
)
for _kind in ("CPU", "Meta"):
    _library.impl("max_pool", _pool.default, _kind)
    _library.impl("max_pool_gradient", _gradient.default, _kind)


# Small values that many read ------------------------------------------------------------------
# Inductor computes what is cheap to write down again at every place that reads it: the scale of a
# batch normalization for each of its pixels, the step size of an optimizer for each weight. There
# is a root or a power in these, which takes longer than all the rest.


def _compute_small_ones_once(graph: Graph) -> None:
    for node in list(graph.nodes):
        if _computes(node) and _is_read_by_much_larger(node):
            readers = list(node.users)
            kept = _in_memory(node, example(node).stride())
            for reader in readers:
                reader.replace_input_with(node, kept)


def _in_memory(node: Node, strides: Sequence[int]) -> Node:
    """A value, computed and put into memory with these strides before anything reads it."""
    from torch._inductor import inductor_prims  # slow to import; here, inductor will be used

    shape = example(node).shape
    if math.prod(shape) > 1:
        kept = _after(node, inductor_prims.force_stride_order, list(strides))
    else:  # one number inductor would take as it is, so it gets two
        pair = _after(node, _aten.expand.default, [2, *shape])
        kept = _after(pair, inductor_prims.force_stride_order, [1, *strides])
        kept = _after(kept, _aten.select.int, 0, 0)
    kept.meta["val"] = example(node)
    return kept


def _after(node: Node, operation: Any, *args: Any) -> Node:
    """An operation on a value, right behind it."""
    with node.graph.inserting_after(node):
        return node.graph.call_function(operation, (node, *args))


def _computes(node: Node) -> bool:
    """Whether a node is arithmetic, with a result of its own."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(example(node), torch.Tensor):
        return False
    arithmetic = torch.Tag.pointwise in target.tags or target is _aten.mean.dim
    return arithmetic and not target._schema.is_mutable


def _is_read_by_much_larger(node: Node) -> bool:
    readers = list(_readers(node))
    if any(_writes(reader, value) for reader, value in readers):
        return False
    limit = _MUCH * example(node).numel()
    return any(_count(reader) >= limit for reader, _ in readers)


def _readers(node: Node) -> Iterator[tuple[Node, Node]]:
    """The operations that compute with a value, or with a view of it: they, and what they get."""
    for user in node.users:
        if isinstance(user.target, torch._ops.OpOverload):
            yield from _readers(user) if user.target.is_view else [(user, node)]


def _writes(node: Node, value: Node) -> bool:
    """Whether an operation updates one of its inputs in place."""
    written = [
        given
        for argument, given in zip(node.target._schema.arguments, node.args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return value in torch.utils._pytree.tree_leaves(written)


def _count(node: Node) -> int:
    """The elements of a node's result, or of the largest one if it has many."""
    value = example(node)
    values = value if isinstance(value, (list, tuple)) else [value]
    return max((math.prod(x.shape) for x in values if isinstance(x, torch.Tensor)), default=0)
