"""Traversals of a graph: from tensors back to their inputs, from sources on to their consumers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import keras

from trainstep.graph._sources import Read
from trainstep.graph._tensors import NodeOperation, node_of


def needed(tensors: Iterable[Any], given: Collection[int] = ()) -> list[Any]:
    """Returns the nodes to compute for tensors, in topological order.

    Args:
        tensors: The tensors.
        given: The ids of tensors whose values are known.
    """
    done: dict[Any, None] = {}
    # A loop: a graph may be deeper than Python's recursion limit.
    stack = [(node, False) for t in tensors if id(t) not in given and (node := node_of(t))]
    stack.reverse()
    while stack:
        node, is_ready = stack.pop()
        if node in done:
            continue
        if is_ready:
            done[node] = None
            continue
        stack.append((node, True))
        parents = [node_of(t) for t in reversed(node.input_tensors) if id(t) not in given]
        stack += [(parent, False) for parent in parents if parent and parent not in done]
    return list(done)


def with_inner_nodes(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yields nodes, and the nodes inside the branches and loops among them."""
    for node in nodes:
        yield node
        yield from with_inner_nodes(getattr(node.operation, "inner", ()))


def sources_of(tensors: Iterable[Any], given: Collection[int] = ()) -> list[Any]:
    """Returns the tensors without inputs that tensors depend on, ours or Keras's own."""
    tensors = list(tensors)
    nodes = needed(tensors, given)
    made = [tensor for node in nodes if not node.input_tensors for tensor in node.outputs]
    used = [*tensors, *(tensor for node in nodes for tensor in node.input_tensors)]
    loose = [t for t in used if node_of(t) is None and id(t) not in given]
    return list({id(t): t for t in (*made, *loose)}.values())


def nodes_from(sources: Iterable[Any]) -> dict[Any, None]:
    """Returns all nodes that depend on sources, in the order of discovery."""
    found = {node: None for source in sources if (node := node_of(source))}
    todo = list(found)
    while todo:
        for after in _consumers(todo.pop()):
            if after not in found:
                found[after] = None
                todo.append(after)
    return found


def _consumers(node: Any) -> list[Any]:
    """The nodes that consume the outputs of a node."""
    # A layer that is called twice has the consumers of both calls in `_outbound_nodes`.
    made = {id(tensor) for tensor in node.outputs}
    every = node.operation._outbound_nodes
    return [each for each in every if made & {id(t) for t in each.input_tensors}]


def downstream(nodes: Iterable[Any], of: Collection[Any]) -> set[Any]:
    """Returns the nodes (in topological order) that are in `of` or depend on nodes in it."""
    found: set[Any] = set()
    for node in nodes:
        if node in of or any(node_of(t) in found for t in node.input_tensors):
            found.add(node)
    return found


def variables_in(node: Any) -> list[Any]:
    """Returns the Keras variables that a node reads: its operation's, and its arguments."""
    operation = node.operation
    if isinstance(operation, Read):
        return [operation.variable]
    arguments = keras.tree.flatten([node.arguments.args, node.arguments.kwargs])
    given = [each for each in arguments if isinstance(each, keras.Variable)]
    own = operation.uses() if isinstance(operation, NodeOperation) else [operation]
    layers = [each for each in own if isinstance(each, keras.Layer)]
    weights = [v for layer in layers for v in layer.variables]
    return [*given, *weights, *(each for each in own if isinstance(each, keras.Variable))]
