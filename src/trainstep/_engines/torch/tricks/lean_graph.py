"""Trick: removes operations of a recorded step that do not affect its results.

To replay an operation takes a microsecond or more, however few elements it has. Keras computes
values that are the same in each step (the size of a batch, a guard against division by zero), some
of them twice, and a record clones every tensor that is updated in place. All of these are removed;
results stay the same to the last bit.

It does not apply to values whose memory is updated in place, since their content changes. So the
optimizer's updates of lists first become new values, and at the end, where these have no other
readers, in-place updates again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from trainstep._engines.torch.tricks.foreach_updates import update_in_place, update_out_of_place
from trainstep._engines.torch.tricks.forget_sources import forgotten
from trainstep._engines.torch.tricks.graph_facts import (
    example,
    have_same_strides,
    is_steady,
    leaving,
    outputs,
    owner,
    reads,
    stand_in,
    steady_operations,
    updated_memory,
)

_aten = torch.ops.aten
_LARGEST = 4096  # elements of a precomputed constant

# Operations whose result does not depend on the values of their input tensors.
_FILLING = {
    _aten.full.default,
    _aten.full_like.default,
    _aten.ones.default,
    _aten.ones_like.default,
    _aten.scalar_tensor.default,
    _aten.zeros.default,
    _aten.zeros_like.default,
}


def lean(module: GraphModule, known: Mapping[int, bool] | None = None) -> GraphModule:
    """Returns an equivalent step with fewer operations.

    Args:
        module: The step.
        known: The constant values of some inputs, by place.
    """
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    result = forgotten(GraphModule(module, graph))
    update_out_of_place(graph)
    _fold(result, known or {})
    _share(graph)
    _divide_plainly(graph)
    _drop_copies(graph)
    graph.eliminate_dead_code()
    update_in_place(graph)
    result.recompile()
    return forgotten(result)


def without_outputs(module: GraphModule, count: int) -> GraphModule:
    """Returns the step with only its first `count` results; operations that may be impure stay."""
    graph = Graph()
    results: Any = graph.graph_copy(module.graph, {})
    graph.output(results[:count])
    updated = updated_memory(graph)
    graph.eliminate_dead_code(lambda node: node.is_impure() or not is_steady(node, updated))
    return forgotten(GraphModule(module, graph))


# Constants ------------------------------------------------------------------------------------


def _fold(module: GraphModule, inputs: Mapping[int, bool]) -> None:
    """Precomputes operations that depend only on constants and known inputs."""
    graph = module.graph
    places = enumerate(graph.find_nodes(op="placeholder"))
    known = {
        node: torch.full(example(node).shape, inputs[place])
        for place, node in places
        if place in inputs
    }
    known |= {node: getattr(module, node.target) for node in graph.find_nodes(op="get_attr")}
    for node in steady_operations(graph):
        value = _value(node, known) if _is_short(example(node)) else None
        if value is not None:
            known[node] = value
        elif (same := _chosen(node, known)) is not None:
            node.replace_all_uses_with(same)
    for node, value in known.items():
        if node.op == "call_function" and any(user not in known for user in node.users):
            name = f"_known_{node.name}"
            module.register_buffer(name, value)
            with graph.inserting_before(node):
                constant = graph.get_attr(name)
            constant.meta.update(node.meta)
            node.replace_all_uses_with(constant)


def _is_short(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() <= _LARGEST


def _value(node: Node, known: dict[Node, Any]) -> Any:
    """Returns the value of a node, if it is constant."""
    given = node.all_input_nodes
    if node.target in _FILLING:
        values = {each: stand_in(example(each)) for each in given}
    elif given and all(each in known for each in given):
        values = known
    else:
        return None
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    return node.target(*args, **kwargs)


def _chosen(node: Node, known: dict[Node, Any]) -> Node | None:
    """Returns the input that a node returns unchanged, if it does."""
    same: Any = None
    if node.target is _aten.where.self and node.args[0] in known:
        condition = known[node.args[0]]
        if condition.numel() == 1:
            same = node.args[1] if condition.item() else node.args[2]
    elif node.target is _aten.pow.Tensor_Scalar and node.args[1] == 1:
        same = node.args[0]
    return same if isinstance(same, Node) and have_same_strides(same, node) else None


# Common values and copies ---------------------------------------------------------------------


def _share(graph: Graph) -> None:
    """Eliminates common subexpressions."""
    seen: dict[Any, Node] = {}
    for node in steady_operations(graph):
        # As text: 1, 1.0 and True are equal, but have different types.
        first = seen.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
    graph.eliminate_dead_code()


def _divide_plainly(graph: Graph) -> None:
    """Removes the guard of a divisor against zero, where the quotient is discarded anyway.

    `where(zero, 0, x / where(zero, 1, y))`: the derivative needs both `where`, the value only one.
    """
    updated = updated_memory(graph)
    for node in graph.find_nodes(op="call_function", target=_aten.where.self):
        zero, _, quotient = node.args
        if not isinstance(quotient, Node) or quotient.target is not _aten.div.Tensor:
            continue
        x, divisor = quotient.args
        if (
            isinstance(divisor, Node)
            and divisor.target is _aten.where.self
            and divisor.args[0] is zero
            and all(is_steady(each, updated) for each in (node, quotient, divisor))
            and reads(node, quotient) == 1
            and len(quotient.users) == 1
            and isinstance(divisor.args[2], Node)
            and have_same_strides(divisor, divisor.args[2])
            and have_same_strides(divisor, quotient)
            and have_same_strides(divisor, node)
        ):
            quotient.args = (x, divisor.args[2])


def _drop_copies(graph: Graph) -> None:
    """Removes copies, except those that keep an output from aliasing."""
    updated = updated_memory(graph)
    for node in list(graph.nodes):
        if node.target is not _aten.clone.default or not is_steady(node, updated):
            continue
        source = node.args[0]
        if not have_same_strides(node, source):
            continue
        if node in leaving(graph):
            others = {owner(output) for output in outputs(graph)} - {node}
            is_new = source.op == "call_function" and owner(source) is source
            if not is_new or source in others:
                continue
        node.replace_all_uses_with(source)
