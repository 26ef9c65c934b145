"""Surgery on a traced torch graph: in-place updates of inputs become updates of clones.

An `fx` graph has its inputs first (state, then arguments) and runs its nodes in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

_clone = torch.ops.aten.clone.default


def make_pure(graph: Any, count: int) -> list[bool]:
    """Puts a clone behind each input that is updated in place; tells which of the first `count` were."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    updated = _updated(graph)
    for node in inputs:
        if node in updated:
            with graph.inserting_after(inputs[-1]):
                copy = graph.call_function(_clone, (node,))
            node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
    return [node in updated for node in inputs[:count]]


def keep_outputs(graph: Any, keep: Sequence[bool]) -> None:
    """Drops those of the first outputs that are not to be kept."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    first, rest = output.args[0][: len(keep)], output.args[0][len(keep) :]
    output.args = ([*(node for node, kept in zip(first, keep, strict=True) if kept), *rest],)
    graph.eliminate_dead_code()


def _updated(graph: Any) -> set[Any]:
    """The inputs that some operation writes into, directly or through a view."""
    root: dict[Any, Any] = {}
    updated: set[Any] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            root[node] = node
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            if node.op == "call_function" and node.args and node.args[0] in root:  # getitem of a list
                root[node] = root[node.args[0]]
            continue
        for argument, given in _arguments(schema, node):
            alias = argument.alias_info
            if alias is None or given not in root:
                continue
            root[node] = root[given]  # a view, or the updated tensor itself
            if alias.is_write:
                updated.add(root[given])
    return updated


def _arguments(schema: Any, node: Any) -> Iterator[tuple[Any, Any]]:
    for index, argument in enumerate(schema.arguments):
        given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        for each in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(each, torch.fx.Node):
                yield argument, each
