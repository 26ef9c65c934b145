"""Ways through a graph: what a tensor needs, and what was made of a source."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import keras

from trainstep.graph._sources import Read
from trainstep.graph._tensors import Made, node_of


def needed(tensors: Iterable[Any], given: Collection[int] = ()) -> list[Any]:
    """The nodes that have to be computed for tensors, each after those that it needs.

    Args:
        tensors: What is wanted.
        given: The ids of tensors that are there already.
    """
    done: dict[Any, None] = {}
    # A loop, since a graph may be deeper than Python's calls may be.
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


def with_inner(nodes: Iterable[Any]) -> Iterator[Any]:
    """Nodes, and those of the branches and loops among them."""
    for node in nodes:
        yield node
        yield from with_inner(getattr(node.operation, "inner", ()))


def sources_of(tensors: Iterable[Any], given: Collection[int] = ()) -> list[Any]:
    """The tensors without inputs that tensors need: of ours, or of somebody else's."""
    tensors = list(tensors)
    nodes = needed(tensors, given)
    made = [tensor for node in nodes if not node.input_tensors for tensor in node.outputs]
    used = [*tensors, *(tensor for node in nodes for tensor in node.input_tensors)]
    loose = [t for t in used if node_of(t) is None and id(t) not in given]
    return list({id(t): t for t in (*made, *loose)}.values())


def nodes_from(sources: Iterable[Any]) -> dict[Any, None]:
    """All nodes that were made of sources, and theirs, in the order in which they are met."""
    found = {node: None for source in sources if (node := node_of(source))}
    todo = list(found)
    while todo:
        for after in _takers(todo.pop()):
            if after not in found:
                found[after] = None
                todo.append(after)
    return found


def _takers(node: Any) -> list[Any]:
    """The nodes that take what a node makes; its operation may be in use elsewhere, too."""
    made = {id(tensor) for tensor in node.outputs}
    every = node.operation._outbound_nodes
    return [each for each in every if made & {id(t) for t in each.input_tensors}]


def downstream(nodes: Iterable[Any], of: Collection[Any]) -> set[Any]:
    """Those of some nodes, each after those that it needs, that depend on others."""
    found: set[Any] = set()
    for node in nodes:
        if node in of or any(node_of(t) in found for t in node.input_tensors):
            found.add(node)
    return found


def variables_in(node: Any) -> list[Any]:
    """The Keras variables that a node reads: those of its operation, and among its arguments."""
    operation = node.operation
    if isinstance(operation, Read):
        return [operation.variable]
    arguments = keras.tree.flatten([node.arguments.args, node.arguments.kwargs])
    given = [each for each in arguments if isinstance(each, keras.Variable)]
    own = operation.uses() if isinstance(operation, Made) else [operation]
    layers = [each for each in own if isinstance(each, keras.Layer)]
    weights = [v for layer in layers for v in layer.variables]
    return [*given, *weights, *(each for each in own if isinstance(each, keras.Variable))]
