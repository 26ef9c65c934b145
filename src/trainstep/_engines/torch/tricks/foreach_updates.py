"""torch: updates of whole lists of tensors, as optimizers have them: in place, or as new values."""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from trainstep._engines.torch.tricks.graph_facts import (
    example,
    lie_alike,
    owner,
    reads,
    shares_memory,
)

_aten = torch.ops.aten

_IN_PLACE = {
    _aten._foreach_add.List: _aten._foreach_add_.List,
    _aten._foreach_add.Scalar: _aten._foreach_add_.Scalar,
    _aten._foreach_div.List: _aten._foreach_div_.List,
    _aten._foreach_mul.List: _aten._foreach_mul_.List,
    _aten._foreach_mul.Scalar: _aten._foreach_mul_.Scalar,
    _aten._foreach_mul.Tensor: _aten._foreach_mul_.Tensor,
    _aten._foreach_sqrt.default: _aten._foreach_sqrt_.default,
}
_ANEW = {updating: anew for anew, updating in _IN_PLACE.items()}


def update_anew(graph: Graph) -> None:
    """Gives lists that are updated in place new values instead, where they have no views."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target not in _ANEW or not _may_be_either(node):
            continue
        given = node.args[0]
        if not all(_is_alone(each) for each in given):
            continue
        with graph.inserting_before(node):
            anew = graph.call_function(_ANEW[node.target], node.args, node.kwargs)
            items = [graph.call_function(operator.getitem, (anew, i)) for i in range(len(given))]
        anew.meta["val"] = [example(each) for each in given]
        for old, new in zip(given, items, strict=True):
            new.meta.update(old.meta)
            order[new] = order[node]
            for user in list(old.users):
                if user is not anew and order[user] > order[node]:
                    user.replace_input_with(old, new)
        graph.erase_node(node)


def _may_be_either(node: Node) -> bool:
    """Whether an operation on a list gives the same in place and anew.

    Not if a part is read for another, and not in half precision, where the two round otherwise.
    """
    dtypes = {example(each).dtype for each in node.all_input_nodes}
    return all(reads(node, each) == 1 for each in node.args[0]) and (
        dtypes in ({torch.float32}, {torch.float64})
    )


def _is_alone(node: Node) -> bool:
    """Whether a value is memory of the step's that nothing is a view of."""
    if node.op != "call_function" or owner(node) is not node:
        return False
    return not any(map(shares_memory, node.users))


def update_in_place(graph: Graph) -> None:
    """Reuses the memory of lists that nothing else reads."""
    updates: set[Node] = set()
    for node in list(graph.nodes):
        if node.target not in _IN_PLACE or not _may_be_either(node):
            continue
        given, items = node.args[0], list(node.users)
        if not all(item.target is operator.getitem for item in items):
            continue
        if not all(_is_for(node, place, updates) for place in range(len(given))):
            continue
        with graph.inserting_before(node):
            updates.add(graph.call_function(_IN_PLACE[node.target], node.args, node.kwargs))
        for item in items:
            item.replace_all_uses_with(given[item.args[1]])
            graph.erase_node(item)
        graph.erase_node(node)


def _is_for(node: Node, place: int, updates: set[Node]) -> bool:
    """Whether a value of the list is new, like the result, and read by this and updates alone."""
    given = node.args[0][place]
    return (
        given.target is operator.getitem
        and given.args[0].target in _IN_PLACE
        and [user for user in given.users if user not in updates] == [node]
        and lie_alike(example(given), example(node)[place])
    )
