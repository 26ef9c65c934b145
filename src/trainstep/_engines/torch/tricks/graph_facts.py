"""torch: what is known of a recorded graph of operations: examples of its values, their memory."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node


def example(node: Any) -> Any:
    """A stand-in for a node's value, from when it was recorded."""
    return node.meta.get("val")


def stand_in(value: Any) -> Any:
    """A tensor without numbers that lies in memory like another."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def are_alike(node: Node, other: Node) -> bool:
    """Whether two values lie in memory alike."""
    return lie_alike(example(node), example(other))


def lie_alike(one: Any, two: Any) -> bool:
    """The same of the values, or of their examples."""
    return bool(one.dtype == two.dtype and one.shape == two.shape and one.stride() == two.stride())


_KNOWN = ("aten", "prims", "trainstep")  # who defines operations that compute, and do nothing else


def steady_operations(graph: Graph) -> Iterator[Node]:
    """The nodes that compute, each time the same of the same, and whose memory stays inside."""
    outside, updated = leaving(graph), updated_memory(graph)
    for node in list(graph.nodes):
        if node not in outside and is_steady(node, updated):
            yield node


def is_steady(node: Node, updated: set[Node]) -> bool:
    """Whether a node computes the same whenever it does, of inputs that stay as they are."""
    if any(owner(each) in updated for each in (node, *node.all_input_nodes)):
        return False
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        drawn = torch.Tag.nondeterministic_seeded in target.tags
        return target.namespace in _KNOWN and not drawn and not _updates(node)
    return target is operator.getitem


def leaving(graph: Graph) -> set[Node]:
    """The outputs, and what they are views of: each has to be memory of its own, at each step."""
    return {maker for output in outputs(graph) for node in views(output) for maker in _made(node)}


def outputs(graph: Graph) -> list[Node]:
    """The nodes whose values a graph gives."""
    return list(graph.output_node().all_input_nodes)


def updated_memory(graph: Graph) -> set[Node]:
    """The nodes whose memory is updated in place."""
    updating = (node for node in graph.nodes if _updates(node))
    owners = (owner(each) for node in updating for each in (node, *node.all_input_nodes))
    return {maker for each in owners for maker in _made(each)}


def views(node: Node) -> Iterator[Node]:
    """A node, what it is a view of, and so on: the last has the memory."""
    while True:
        yield node
        made = node.args[0] if node.target is operator.getitem else node
        if not shares_memory(made):
            return
        node = made.all_input_nodes[0]


def owner(node: Node) -> Node:
    """The node whose memory this one's value is in."""
    *_, last = views(node)
    return last


def shares_memory(node: Node) -> bool:
    """Whether an operation gives a view of its first input, or that input itself."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if "unsafe_" in target._schema.name:  # `_unsafe_view`: it is one, and does not say so
        return True
    return any(each.alias_info is not None for each in target._schema.returns)


# They update statistics, and do not say so.
_SECRETIVE = ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm")


def _updates(node: Node) -> bool:
    """Whether an operation updates some of its inputs in place."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    return schema.is_mutable or schema.name in _SECRETIVE


def _made(node: Node) -> Sequence[Node]:
    """A node, and the operation that gives it among others."""
    return [node, node.args[0]] if node.target is operator.getitem else [node]


def reads(node: Node, given: Node) -> int:
    """How often a node has another among its arguments."""
    arguments = torch.utils._pytree.tree_leaves((node.args, node.kwargs))
    return sum(each is given for each in arguments)
