"""torch: parts of a recorded step, replaced by others that run faster on a CPU.

    graph --where images lie: for every way to run it--> graph --for inductor alone--> graph

Keras writes its layers for images whose channels come last, and asks torch for copies that it can
do without. Inductor writes good loops for most operations and bad ones for a few. A rule knows one
such form, gives the same numbers, and where it is not sure it leaves the graph alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

_aten = torch.ops.aten
_pool = _aten.max_pool2d_with_indices
_gradient = _aten.max_pool2d_with_indices_backward
_MUCH = 64  # times as many elements


def rewritten(module: GraphModule) -> GraphModule:
    """A copy of a recorded step that inductor compiles to faster loops."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    _pool_by_torch(graph)
    _compute_small_ones_once(graph)
    return GraphModule(module, graph)


# Max pooling ----------------------------------------------------------------------------------
# Keras puts the channels first and copies, which torch's kernel does not need, and which leads it
# to its slow form. Inductor has no kernel for the gradient: it finds the maxima again, element by
# element, and scatters. Torch's own kernels are hidden from it in operations of ours.


def pool_where_images_lie(graph: Graph) -> None:
    """Takes out the copies before max pooling whose result is turned back at once."""
    for node in list(graph.nodes):
        if node.target is not _pool.default:
            continue
        copy = node.args[0]
        if copy is node.prev and copy.target is _aten.clone.default and _is_turned(copy.args[0]):
            gradients = [user for user in copy.users if user is not node]
            maxima = [user for user in node.users if user.args[1] == 0]
            alone = all(user.target is _gradient.default for user in gradients)
            if alone and all(map(_is_turned_back, (*maxima, *gradients))):
                copy.replace_all_uses_with(copy.args[0])
    graph.eliminate_dead_code()


def _is_turned(node: Node) -> bool:
    """Whether this is the view, with channels first, of an image whose channels come last."""
    return node.target is _aten.permute.default and node.args[1] == [0, 3, 1, 2]


def _is_turned_back(node: Node) -> bool:
    """Whether nobody sees how a result lies in memory."""
    return all(
        user.target is _aten.permute.default and user.args[1] == [0, 2, 3, 1] for user in node.users
    )


def _pool_by_torch(graph: Graph) -> None:
    for node in list(graph.nodes):
        if node.target is not _pool.default:
            continue
        image = node.args[0]
        if _is_turned(image) and _example(image).device.type == "cpu":
            node.target = torch.ops.trainstep.max_pool.default
            for places in (user for user in node.users if user.args[1] == 1):
                for user in places.users:
                    if user.target is _gradient.default:
                        user.target = torch.ops.trainstep.max_pool_gradient.default


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
    from torch._inductor import inductor_prims  # slow to import; here, inductor has been

    for node in list(graph.nodes):
        if not _computes(node) or not _is_read_by_much_larger(node):
            continue
        value = _example(node)
        with graph.inserting_after(node):
            kept = graph.call_function(
                inductor_prims.force_stride_order, (node, list(value.stride()))
            )
        kept.meta["val"] = value
        node.replace_all_uses_with(kept, delete_user_cb=lambda user, kept=kept: user is not kept)


def _computes(node: Node) -> bool:
    """Whether a node is arithmetic, with a result of its own."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(
        _example(node), torch.Tensor
    ):
        return False
    arithmetic = torch.Tag.pointwise in target.tags or target is _aten.mean.dim
    return arithmetic and not target._schema.is_mutable


def _is_read_by_much_larger(node: Node) -> bool:
    readers = list(_readers(node))
    if any(_writes(reader, value) for reader, value in readers):
        return False
    limit = _MUCH * _example(node).numel()
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
    value = _example(node)
    values = value if isinstance(value, (list, tuple)) else [value]
    return max((math.prod(x.shape) for x in values if isinstance(x, torch.Tensor)), default=0)


def _example(node: Any) -> Any:
    """A stand-in for a node's value, from when it was recorded."""
    return node.meta.get("val")
