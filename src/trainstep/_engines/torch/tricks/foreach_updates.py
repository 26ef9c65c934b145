"""Trick: a part of `lean_graph`: turns `_foreach` updates into new values, and back.

Optimizers update lists of tensors in place. As new values, they can be simplified like other
operations; afterwards, in-place updates save the allocations where a value has no other readers. It
does not apply to lists with views, to half precision, or if an update reads a tensor twice.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from trainstep._engines.torch.tricks.graph_facts import (
    example,
    owner,
    reads,
    same_strides,
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
_OUT_OF_PLACE = {in_place: new_values for new_values, in_place in _IN_PLACE.items()}


def update_out_of_place(graph: Graph) -> None:
    """Replaces in-place updates of lists without views by new values."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target not in _OUT_OF_PLACE or not _is_equivalent(node):
            continue
        given = node.args[0]
        if not all(_has_no_views(each) for each in given):
            continue
        with graph.inserting_before(node):
            new_values = graph.call_function(_OUT_OF_PLACE[node.target], node.args, node.kwargs)
            items = [
                graph.call_function(operator.getitem, (new_values, i)) for i in range(len(given))
            ]
        new_values.meta["val"] = [example(each) for each in given]
        for old, new in zip(given, items, strict=True):
            new.meta.update(old.meta)
            order[new] = order[node]
            for user in list(old.users):
                if user is not new_values and order[user] > order[node]:
                    user.replace_input_with(old, new)
        graph.erase_node(node)


def _is_equivalent(node: Node) -> bool:
    """Whether an operation on a list has the same result in place and as new values.

    Not if it reads a tensor of the list twice, nor in half precision, where rounding differs.
    """
    dtypes = {example(each).dtype for each in node.all_input_nodes}
    return all(reads(node, each) == 1 for each in node.args[0]) and (
        dtypes in ({torch.float32}, {torch.float64})
    )


def _has_no_views(node: Node) -> bool:
    """Whether the step allocates a value, and it has no views."""
    if node.op != "call_function" or owner(node) is not node:
        return False
    return not any(map(shares_memory, node.users))


def update_in_place(graph: Graph) -> None:
    """Replaces operations on lists without other readers by in-place updates."""
    updates: set[Node] = set()
    for node in list(graph.nodes):
        if node.target not in _IN_PLACE or not _is_equivalent(node):
            continue
        given, items = node.args[0], list(node.users)
        if not all(item.target is operator.getitem for item in items):
            continue
        if not all(_is_reusable(node, place, updates) for place in range(len(given))):
            continue
        with graph.inserting_before(node):
            updates.add(graph.call_function(_IN_PLACE[node.target], node.args, node.kwargs))
        for item in items:
            item.replace_all_uses_with(given[item.args[1]])
            graph.erase_node(item)
        graph.erase_node(node)


def _is_reusable(node: Node, place: int, updates: set[Node]) -> bool:
    """Whether a list's value is new, has the result's strides, and no readers but `updates`."""
    given = node.args[0][place]
    return (
        given.target is operator.getitem
        and given.args[0].target in _IN_PLACE
        and [user for user in given.users if user not in updates] == [node]
        and same_strides(example(given), example(node)[place])
    )
