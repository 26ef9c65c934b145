"""PyTorch: compiles or replays a recorded step, and runs it on the variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainstep._engines.contract import Executable, Tensor, Variable
from trainstep._engines.shared.host_function import Host
from trainstep._engines.torch import tricks
from trainstep._engines.torch.host import new_token
from trainstep._engines.torch.private import inductor_compile
from trainstep._engines.torch.state import as_tensor, set_grad_enabled, value_of, write_back


def _switches(reads: list[Variable], writes: list[Variable]) -> list[int]:
    """Returns the places of scalar bools that a step reads and does not write."""
    return [
        place
        for place, variable in enumerate(reads)
        if variable._value.dtype == torch.bool
        and variable._value.numel() == 1
        and variable._value.device.type == "cpu"
        and not any(variable is written for written in writes)
    ]


def build(
    module: Any,
    reads: list[Variable],
    writes: list[Variable],
    tensors: list[Tensor],
    compiler: str,
    *,
    hosts: Sequence[Host],
    as_is: bool,
) -> Executable:
    """Returns an executable that runs a recorded step on its variables.

    Args:
        module: The record, whose inputs are the variables and the arguments.
        reads: The variables that it reads, in the order of its inputs.
        writes: The variables that it writes, in the order of its outputs.
        tensors: Examples of the arguments.
        compiler: `"inductor"`, or `"graph"` to replay it.
        hosts: The host functions that it calls.
        as_is: Whether it is for these sizes only.
    """
    if compiler == "graph" and as_is and not hosts:  # it has no host calls: only plain operations
        with torch.no_grad():
            replayed = _replayed(module, reads, writes)
        if replayed is not None:
            return replayed
    call: Callable[..., Any] = module.forward
    token = [new_token()] if hosts else []
    if compiler == "inductor":
        state = [v._value.detach() for v in reads]
        with torch.no_grad():
            call = inductor_compile(tricks.rewritten(module), [*state, *tensors, *token])
    outputs = slice(len(writes), -1 if hosts else None)

    def run(leaves: Sequence[Any]) -> Sequence[Tensor]:
        arrays = _arrays(leaves)
        enabled = torch.is_grad_enabled()
        # Not `torch.no_grad`, which is Python code: Ctrl-C in it could leave gradients disabled.
        try:
            set_grad_enabled(False)
            results = call(*map(value_of, reads), *arrays, *token)
            write_back(writes, results)
        finally:
            set_grad_enabled(enabled)
        return results[outputs]  # type: ignore[no-any-return]

    run.hosts = hosts  # type: ignore[attr-defined]  # keeps them alive
    return run


def _arrays(leaves: Sequence[Any]) -> list[Tensor]:
    return [x.contiguous() if type(x) is torch.Tensor else as_tensor(x) for x in leaves]


def _replayed(module: Any, reads: list[Variable], writes: list[Variable]) -> _Replayed | None:
    places = {id(variable): place for place, variable in enumerate(reads)}
    last = [v for v in writes if id(v) not in places]  # written, and not read
    inputs = len(module.graph.find_nodes(op="placeholder"))
    places |= {id(v): inputs + place for place, v in enumerate(last)}
    replay = tricks.replay(module, _switches(reads, writes), [places[id(v)] for v in writes])
    return None if replay is None else _Replayed(replay, reads, last)


class _Replayed:
    """Runs a recorded step with fixed sizes and without host calls."""

    def __init__(self, replay: Any, reads: list[Variable], last: list[Variable]) -> None:
        self._replay, self._reads, self._last = replay, reads, last

    def __call__(self, leaves: Sequence[Any]) -> Sequence[Tensor]:
        return self._run(self._replay, leaves)

    def unread(self, leaves: Sequence[Any]) -> None:
        """Runs the step for its writes only."""
        self._run(self._replay.unread, leaves)

    def _run(self, replay: Callable[..., Any], leaves: Sequence[Any]) -> Sequence[Tensor]:
        arrays = _arrays(leaves)
        enabled = torch.is_grad_enabled()
        try:
            set_grad_enabled(False)
            return replay(  # type: ignore[no-any-return]
                *map(value_of, self._reads), *arrays, *map(value_of, self._last)
            )
        finally:
            set_grad_enabled(enabled)
