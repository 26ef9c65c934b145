"""PyTorch: host calls, as a custom operation in the recorded graph.

    token --host--> token, results --host--> token, results ... --> the graph's last output

Each call passes a token to the next. The token is an input and an output of the graph, so no graph
pass can drop a call, evaluate it ahead of time, or change the order. The operation has the number
of its function in a weak table; the program owns the function.
"""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor_tree,
)

from trainstep._common.errors import TrainstepError
from trainstep._engines.contract import Tensor
from trainstep._engines.shared.host_function import Host, HostFunction, Results
from trainstep._state.scopes import active

_hosts: weakref.WeakValueDictionary[int, Host] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_MOST = 1_000_000  # calls in one run of a step that only finds its variables


def host_call(fn: HostFunction, tensors: Sequence[Tensor], results: Results) -> list[Tensor]:
    """Calls `fn` now, or at every run of the graph that is being recorded."""
    recorder = active()
    if recorder is None:
        return list(map(_from_numpy, fn(list(map(_to_numpy, tensors)))))
    host = Host(fn)
    recorder.hosts.append(host)
    if recorder.uncompiled:
        return _not_called(len(recorder.hosts), results)
    number = next(_numbers)
    _hosts[number] = host
    values = [_tensor(x).detach() for x in tensors]
    token = recorder.first_token() if recorder.token is None else recorder.token
    outs: list[Tensor]
    recorder.token, *outs = _operation(token, number, json.dumps(results), values)
    return outs


def new_token() -> Tensor:
    """Returns the last input of a program with host calls."""
    return torch.zeros(())


def token_input(copy: Callable[[Tensor], Tensor]) -> Tensor:
    """Adds the token as the last input of the graph that is being recorded."""
    mode = get_proxy_mode()
    assert mode is not None
    with disable_proxy_modes_tracing(), torch.no_grad():
        value = copy(new_token())
    graph = mode.tracer.graph
    given = [node for node in graph.nodes if node.op == "placeholder"]
    first = next(iter(graph.nodes), None)
    with graph.inserting_after(given[-1]) if given else graph.inserting_before(first):
        proxy = mode.tracer.create_proxy("placeholder", "token", (), {})
    track_tensor_tree(value, proxy, constant=None, tracer=mode.tracer)
    return value


def _not_called(count: int, results: Results) -> list[Tensor]:
    """Returns zeros instead of a call, in the run that only finds the variables of a step."""
    if results and count > _MOST:
        raise TrainstepError(
            "a loop that depends on the result of a host call does not end on torch: the run that "
            "finds the step's variables uses zeros as results.\n"
            "  to fix:   make the loop end with zeros, too, or move it out of the step"
        )
    return _zeros(results)


def _zeros(results: Results) -> list[Tensor]:
    return [torch.zeros(shape, dtype=getattr(torch, dtype)) for shape, dtype in results]


def _tensor(x: Any) -> Tensor:
    """Returns a tensor; a symbolic size is converted without reading its value."""
    return x if isinstance(x, torch.Tensor) else torch.scalar_tensor(x, dtype=_DTYPES[type(x)])


_DTYPES = {torch.SymInt: torch.int64, torch.SymFloat: torch.float64, torch.SymBool: torch.bool}


def _to_numpy(x: Tensor) -> Any:
    x = x.detach().cpu()
    # NumPy's bfloat16 is of `ml_dtypes`, which torch does not support.
    if x.dtype is torch.bfloat16:
        return x.float().numpy().astype("bfloat16")
    return x.numpy().copy()


def _from_numpy(x: Any) -> Tensor:
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.astype("float32")).bfloat16()
    return torch.from_numpy(np.array(x))


_library = torch.library.Library("trainstep", "FRAGMENT")
_library.define("host(Tensor token, int number, str results, Tensor[] values) -> Tensor[]")


def _run(token: Tensor, number: int, results: str, values: Sequence[Tensor]) -> list[Tensor]:
    if active() is not None:  # during recording, which computes real values
        return [token.clone(), *_zeros(json.loads(results))]
    outs = _hosts[number].fn(list(map(_to_numpy, values)))
    return [token.clone(), *map(_from_numpy, outs)]


def _shapes(token: Tensor, number: int, results: str, values: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(token), *_zeros(json.loads(results))]


_library.impl("host", _run, "CompositeExplicitAutograd")
torch.library.register_fake("trainstep::host", _shapes, lib=_library)
_operation = torch.ops.trainstep.host.default
