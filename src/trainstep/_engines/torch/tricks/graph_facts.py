"""Trick: a part of `lean_graph` and `rewrites`: properties of the nodes of a recorded graph.

The strides of values, their aliasing, and whether memory is updated in place decide where a rewrite
is safe. A rewrite is skipped where they are not known.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node


def example(node: Any) -> Any:
    """Returns a stand-in for a node's value, which was recorded with the graph."""
    return node.meta.get("val")


def stand_in(value: Any) -> Any:
    """Returns an uninitialized tensor with the shape, strides and dtype of another."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def have_same_strides(node: Node, other: Node) -> bool:
    """Whether the values of two nodes have the same dtype, shape and strides."""
    return same_strides(example(node), example(other))


def same_strides(one: Any, two: Any) -> bool:
    """Whether two tensors have the same dtype, shape and strides."""
    return bool(one.dtype == two.dtype and one.shape == two.shape and one.stride() == two.stride())


_KNOWN = ("aten", "prims", "trainstep")  # namespaces of operations without side effects


def steady_operations(graph: Graph) -> Iterator[Node]:
    """Yields the deterministic, pure nodes whose memory is not returned."""
    outside, updated = leaving(graph), updated_memory(graph)
    for node in list(graph.nodes):
        if node not in outside and is_steady(node, updated):
            yield node


def is_steady(node: Node, updated: set[Node]) -> bool:
    """Whether a node is deterministic, and its inputs and result are not updated in place."""
    if any(owner(each) in updated for each in (node, *node.all_input_nodes)):
        return False
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        drawn = torch.Tag.nondeterministic_seeded in target.tags
        return target.namespace in _KNOWN and not drawn and not _updates(node)
    return target is operator.getitem


def leaving(graph: Graph) -> set[Node]:
    """Returns the outputs and the nodes that they are views of: memory that each step allocates."""
    return {maker for output in outputs(graph) for node in views(output) for maker in _made(node)}


def outputs(graph: Graph) -> list[Node]:
    """Returns the nodes whose values a graph returns."""
    return list(graph.output_node().all_input_nodes)


def updated_memory(graph: Graph) -> set[Node]:
    """Returns the nodes whose memory is updated in place."""
    updating = (node for node in graph.nodes if _updates(node))
    owners = (owner(each) for node in updating for each in (node, *node.all_input_nodes))
    return {maker for each in owners for maker in _made(each)}


def views(node: Node) -> Iterator[Node]:
    """Yields a node, the node that it is a view of, and so on; the last one owns the memory."""
    while True:
        yield node
        made = node.args[0] if node.target is operator.getitem else node
        if not shares_memory(made):
            return
        node = made.all_input_nodes[0]


def owner(node: Node) -> Node:
    """Returns the node that owns the memory of this node's value."""
    *_, last = views(node)
    return last


def shares_memory(node: Node) -> bool:
    """Whether an operation returns a view of its first input, or the input itself."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    # `_unsafe_view` is a view, but its schema does not declare it.
    if "unsafe_" in target._schema.name:
        return True
    return any(each.alias_info is not None for each in target._schema.returns)


# They update statistics in place, but their schemas do not declare it.
_UNDECLARED = ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm")


def _updates(node: Node) -> bool:
    """Whether an operation updates some of its inputs in place."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    return schema.is_mutable or schema.name in _UNDECLARED


def _made(node: Node) -> Sequence[Node]:
    """Returns a node, and the operation that returns it as one of several results."""
    return [node, node.args[0]] if node.target is operator.getitem else [node]


def reads(node: Node, given: Node) -> int:
    """Counts how often a node has another one as an argument."""
    arguments = torch.utils._pytree.tree_leaves((node.args, node.kwargs))
    return sum(each is given for each in arguments)
