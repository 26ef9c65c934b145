"""torch: a recorded step, compiled or replayed, and Python's part in running it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainstep._engines._base import Executable, Tensor, Variable
from trainstep._engines._hosting import Host
from trainstep._engines._torch_host import new_token
from trainstep._engines._torch_rewrites import rewritten
from trainstep._engines._torch_script import replayed
from trainstep._engines._torch_state import as_tensor, set_grad_enabled, value_of, write_back


def _switches(reads: list[Variable], writes: list[Variable]) -> list[int]:
    """The places of single bools that a step reads and leaves as they are."""
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
    """What runs a recorded step on its variables where they are.

    Args:
        module: The record, of the variables and the arguments.
        reads: The variables that it reads, in the order of its inputs.
        writes: Those that it writes, in the order of its outputs.
        tensors: Examples of the arguments.
        compiler: `"inductor"`, or `"graph"` to replay it.
        hosts: The functions on the host that it calls.
        as_is: Whether it is for these sizes alone.
    """
    call: Callable[..., Any] = module.forward
    token = [new_token()] if hosts else []
    if compiler == "inductor":
        state = [v._value.detach() for v in reads]
        with torch.no_grad():
            call = torch._inductor.compile(rewritten(module), [*state, *tensors, *token])
    elif as_is and not hosts:  # all that it does are operations, of fixed sizes
        with torch.no_grad():
            call = replayed(module, _switches(reads, writes))
    outputs = slice(len(writes), -1 if hosts else None)

    def run(leaves: Sequence[Any]) -> Sequence[Tensor]:
        arrays = [x.contiguous() if type(x) is torch.Tensor else as_tensor(x) for x in leaves]
        enabled = torch.is_grad_enabled()
        # Not `torch.no_grad`, which is Python: Ctrl-C inside it would leave gradients turned off.
        try:
            set_grad_enabled(False)
            results = call(*map(value_of, reads), *arrays, *token)
            write_back(writes, results)
        finally:
            set_grad_enabled(enabled)
        return results[outputs]  # type: ignore[no-any-return]

    run.hosts = hosts  # type: ignore[attr-defined]  # they live as long as this does
    return run
