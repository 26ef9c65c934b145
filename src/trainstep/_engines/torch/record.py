"""PyTorch: makes a recorded step pure: its inputs, its outputs and its in-place updates.

    variables --inputs of the graph--> record --copies against aliasing--> outputs, new values

The graph may update its own tensors in place, but not its inputs; and no result may alias another
result or an input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor_tree,
)

from trainstep._engines.contract import Tensor, Variable
from trainstep._engines.torch import tricks
from trainstep._engines.torch.state import WIDENED, memory
from trainstep._engines.torch.trace_guard import TraceGuard
from trainstep._state.scopes import Recorder


def own_copy(value: Tensor) -> Tensor:
    """Returns a copy: another variable may alias the original, and update it in place."""
    return value.clone()


def unalias(
    guard: TraceGuard,
    recorder: Recorder,
    sources: dict[int, Tensor],
    outputs: list[Tensor],
    given: set[int],
) -> list[Tensor]:
    """Returns new values and outputs that alias neither each other nor the inputs.

    Only memory allocated during the trace may be returned, and only once. `sources` are the values
    as they were assigned, before the copy; without other owners, the copy is not needed.
    """
    taken: set[int] = set()

    def own(value: Tensor) -> Tensor:
        shared = memory(value) in taken | given or not guard.made(value)
        if shared or not value.is_contiguous():
            value = value.clone(memory_format=torch.contiguous_format)
        taken.add(memory(value))
        return value

    outputs = [own(x) for x in outputs]
    new = []
    for key in recorder.writes:
        value = recorder.state_mapping[key]
        source = sources.get(key, value)
        if not guard.updated(source) and not guard.updated(value):
            value = source
        # The graph clones an input that is updated in place, so its memory is not the variable's.
        lifted_in_place = key in recorder.reads and guard.updated(value)
        new.append(value if lifted_in_place and memory(value) not in taken else own(value))
        taken.add(memory(new[-1]))
    return [*new, *outputs]


def input_of(variable: Variable, inputs: list[Any], copy: Callable[[Tensor], Tensor]) -> Tensor:
    """Adds a variable as an input of the graph that is being traced; returns a clone."""
    mode = get_proxy_mode()
    assert mode is not None
    graph = mode.tracer.graph
    with disable_proxy_modes_tracing(), torch.no_grad():
        if variable._value is None:  # created in this trace, and initialized after it
            dtype = getattr(torch, WIDENED.get(variable._dtype, variable._dtype))
            value = torch.zeros(tuple(variable.shape), dtype=dtype)
        else:
            value = copy(variable._value)
    first = next(iter(graph.nodes), None)
    with graph.inserting_after(inputs[-1].node) if inputs else graph.inserting_before(first):
        proxy = mode.tracer.create_proxy("placeholder", f"state_{len(inputs)}", (), {})
    inputs.append(proxy)
    track_tensor_tree(value, proxy, constant=None, tracer=mode.tracer)
    if variable.trainable and value.is_floating_point():
        value.requires_grad_()  # a step may use torch's own autograd
    return value


def tidy(module: Any, updated: Sequence[bool], *, as_is: bool) -> None:
    """Makes a record pure, and removes copies if it is for these sizes and one process."""
    tricks.forget_source(module)
    _clone_inputs(module.graph, updated)
    _drop_detach(module.graph)
    if as_is:
        tricks.skip_pooling_copies(module.graph)
    module.recompile()
    tricks.forget_source(module)


def _clone_inputs(graph: Any, updated: Sequence[bool]) -> None:
    """Inserts a clone of each of the first inputs that is updated in place."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node, hit in zip(inputs, updated, strict=False):
        if hit:
            with graph.inserting_after(inputs[-1]):
                copy = graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta.update(node.meta)
            node.replace_all_uses_with(
                copy, delete_user_cb=lambda user, copy=copy: user is not copy
            )


def _drop_detach(graph: Any) -> None:
    """Removes operations that only affect autograd, and unused ones."""
    for node in graph.nodes:
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()
