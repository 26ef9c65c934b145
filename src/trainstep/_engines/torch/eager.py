"""PyTorch: the fallback for a step that cannot be recorded: it runs as Python at every call.

`keras.ops.while_loop` needs the value of its predicate in each iteration, which a graph with
gradients cannot express. Such a step is as safe as a compiled one (it works on clones, and new
values are swapped in at the end) but slower, and the ledger reports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trainstep._engines.contract import Executable, Sizes, Step, Tensor, Traced, Variable
from trainstep._engines.torch.state import as_tensor, leaf_copy, set_grad_enabled, write_back
from trainstep._state.scopes import Recorder, Recording, initialize_pending


def eager(step: Step, tensors: Sequence[Tensor], recorder: Recorder, culprit: str) -> Traced:
    """Runs the step once on clones to find its variables; its program runs it at every call."""
    recorder.uncompiled = True
    _run(step, tensors, recorder)
    reads, writes = list(recorder.reads.values()), list(recorder.writes.values())
    place = recorder.current_graph

    def build(compiler: str, bucket: Sizes | None = None) -> Executable:
        def run(leaves: Sequence[Any]) -> Sequence[Tensor]:
            scope = Recording(place)
            enabled = torch.is_grad_enabled()
            try:
                outputs = _run(step, [as_tensor(x).clone() for x in leaves], scope)
                set_grad_enabled(False)
                write_back(list(scope.writes.values()), scope.new_values())
            finally:
                set_grad_enabled(enabled)
            return outputs

        return run

    return Traced(reads, writes, build, uncompiled=culprit)


def _run(step: Step, tensors: Sequence[Tensor], scope: Recording) -> list[Tensor]:
    lifted: dict[int, Tensor] = {}
    versions: dict[int, tuple[Tensor, int]] = {}  # with the tensor, so that its id is not reused

    def noted(value: Tensor) -> Tensor:
        versions[id(value)] = (value, value._version)
        return value

    def updated(value: Tensor) -> bool:
        _, version = versions.get(id(value), (value, value._version))
        return bool(value._version != version)

    def lift(variable: Variable) -> Tensor:
        if variable._value is None:
            initialize_pending()
        with torch.no_grad():
            value = variable._value.detach().clone()
        value.requires_grad_(variable.trainable and value.is_floating_point())
        lifted[id(variable)] = noted(value)
        return value

    scope.reads.clear()
    scope.writes.clear()
    scope.state_mapping.clear()
    scope.lift = lift
    scope.copied = lambda value: noted(leaf_copy(value))
    scope.shielded = lambda value: noted(value.clone())
    scope.updated_in_place = updated
    scope.store = lambda variable, value: value.detach().clone()
    with scope:
        outputs = step(tensors)
    for key, value in lifted.items():
        if updated(value) and key not in scope.writes:
            scope.writes[key] = scope.reads[key]
    return [
        x.detach().clone() if isinstance(x, torch.Tensor) else torch.as_tensor(x) for x in outputs
    ]
