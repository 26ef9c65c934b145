"""Trick: replaces parts of a recorded step by others that run faster on a CPU.

    graph --pooling without copies: for every compiler--> graph --for inductor only--> graph

Keras has images with channels last, and copies them for torch's max pooling, which does not need
that. Inductor generates fast loops for most operations and slow ones for a few: gradients of max
pooling, and small values that are computed again for each element of a large result. Results do not
change.

It does not apply on other devices, nor where the conditions of a rule are not met: the graph stays.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from trainstep._engines.torch.private import fake_tensors
from trainstep._engines.torch.tricks.forget_sources import forgotten
from trainstep._engines.torch.tricks.graph_facts import example, stand_in

_aten = torch.ops.aten
_pool = _aten.max_pool2d_with_indices
_gradient = _aten.max_pool2d_with_indices_backward
_MUCH = 64  # ratio of elements from which a reader is much larger


def rewritten(module: GraphModule) -> GraphModule:
    """Returns a copy of a recorded step that inductor compiles to faster loops."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    _pool_by_torch(graph)
    _pad_contiguously(graph)
    _store_small_values(graph)
    return forgotten(GraphModule(module, graph))


# Max pooling ----------------------------------------------------------------------------------
# Keras moves the channels to the front and copies; torch's kernel does not need the copy, and is
# slow on it. Inductor has no kernel for the gradient: it searches the maxima again, element by
# element, and scatters. Custom operations hide torch's own kernels from inductor.


def skip_pooling_copies(graph: Graph) -> None:
    """Removes the copies before max pooling, where the new strides do not reach the outputs."""
    for node in list(graph.nodes):
        if node.target is not _pool.default:
            continue
        copy = node.args[0]
        if (
            copy is node.prev
            and copy.target is _aten.clone.default
            and _is_channels_first_view(copy.args[0])
        ):
            others = [user for user in copy.users if user is not node]
            pooled = all(user.target is _gradient.default for user in others)
            if pooled and _is_replaceable(copy, copy.args[0]):
                copy.replace_all_uses_with(copy.args[0])
    graph.eliminate_dead_code()


def _is_channels_first_view(node: Node) -> bool:
    """Whether a node is a view with channels first of an image with channels last."""
    return node.target is _aten.permute.default and node.args[1] == [0, 3, 1, 2]


def _is_replaceable(node: Node, other: Node) -> bool:
    """Whether another node, with the same values but other strides, can replace a node.

    The strides of later values change, too. They must not change for outputs, nor for operations
    that depend on strides: torch has recorded some of them for the strides of the trace.
    """
    with fake_tensors().FakeTensorMode():
        moved: dict[Node, Any] = {node: stand_in(example(other))}
        for user in _after_node(node):
            if not any(given in moved for given in user.all_input_nodes):
                continue
            if not _ignores_strides(user):
                return False
            try:
                value = _run(user, moved)
            except (
                Exception
            ):  # a view that is not possible now, or an operation without a fake kernel
                return False
            if _strides(value) != _strides(example(user)):
                moved[user] = value
    return True


def _after_node(node: Node) -> Iterator[Node]:
    while node.next.op != "root":
        node = node.next
        yield node


def _ignores_strides(node: Node) -> bool:
    """Whether the result of an operation does not depend on the strides of its operands."""
    target = node.target
    if target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target is _aten.as_strided.default:
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:  # random numbers fill memory in its order
        return False
    return target.is_view or torch.Tag.pointwise in target.tags or target in _STRIDE_INDEPENDENT


_STRIDE_INDEPENDENT = {
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
        if _is_channels_first_view(image) and example(image).device.type == "cpu":
            node.target = torch.ops.trainstep.max_pool.default
            for places in (user for user in node.users if user.args[1] == 1):
                for user in places.users:
                    if user.target is _gradient.default:
                        user.target = torch.ops.trainstep.max_pool_gradient.default


def _pad_contiguously(graph: Graph) -> None:
    """Makes the operands of gradients of replication padding contiguous.

    Keras uses replication padding before a pooling with padding. Inductor passes operands with any
    strides to its gradient, but expects the strides of the result for contiguous ones.
    """
    for node in list(graph.nodes):
        if node.target in _PADDING_GRADIENTS:
            plain = [
                _stored(given, torch.empty(example(given).shape, device="meta").stride())
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


# Small values with large readers --------------------------------------------------------------
# Inductor inlines small computations into every loop that reads them: the scale of a batch
# normalization for each pixel, the step size of an optimizer for each weight. They contain a square
# root or a power, which takes longer than the rest of the loop.


def _store_small_values(graph: Graph) -> None:
    for node in list(graph.nodes):
        if _computes(node) and _is_read_by_much_larger(node):
            readers = list(node.users)
            kept = _stored(node, example(node).stride())
            for reader in readers:
                reader.replace_input_with(node, kept)


def _stored(node: Node, strides: Sequence[int]) -> Node:
    """Forces inductor to store a value in memory, with these strides, before it is read."""
    from torch._inductor import inductor_prims  # slow to import, but inductor is used in any case

    shape = example(node).shape
    if math.prod(shape) > 1:
        kept = _after(node, inductor_prims.force_stride_order, list(strides))
    else:  # inductor inlines a single element, so it gets two
        pair = _after(node, _aten.expand.default, [2, *shape])
        kept = _after(pair, inductor_prims.force_stride_order, [1, *strides])
        kept = _after(kept, _aten.select.int, 0, 0)
    kept.meta["val"] = example(node)
    return kept


def _after(node: Node, operation: Any, *args: Any) -> Node:
    """Inserts an operation on a value, right after it."""
    with node.graph.inserting_after(node):
        return node.graph.call_function(operation, (node, *args))


def _computes(node: Node) -> bool:
    """Whether a node is arithmetic, with a newly allocated result."""
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
    """Yields the operations that read a value, or a view of it, with the node that they read."""
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
    """Returns the number of elements of a node's result, the largest of several."""
    value = example(node)
    values = value if isinstance(value, (list, tuple)) else [value]
    return max((math.prod(x.shape) for x in values if isinstance(x, torch.Tensor)), default=0)
