"""torch: calls to the host, as an operation of ours in the recorded graph.

    token --host--> token, results --host--> token, results ... --> the graph's last output

The token goes from one call to the next. It is an input and an output of the graph, so that no
pass over the graph may drop a call, compute it ahead, or change the order. The operation knows its
function by a number; the program holds the function, and the table of numbers does not.
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
_MOST = 1_000_000  # calls in one run that looks for a step's variables


def host_call(fn: HostFunction, tensors: Sequence[Tensor], results: Results) -> list[Tensor]:
    """Calls `fn` at once, or whenever the graph that is being recorded runs."""
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
    """The last input of a program that calls the host."""
    return torch.zeros(())


def token_input(copy: Callable[[Tensor], Tensor]) -> Tensor:
    """The token, as the last input of the graph that is being recorded."""
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
    """Stands for a call in the run that only looks for the variables of a step."""
    if results and count > _MOST:
        raise TrainstepError(
            "a loop that waits for what a function on the host returns cannot be a step on torch: "
            "its variables are looked for with zeros in place of what is returned.\n"
            "  to fix:   let the loop end with zeros, too, or take it out of the step"
        )
    return _zeros(results)


def _zeros(results: Results) -> list[Tensor]:
    return [torch.zeros(shape, dtype=getattr(torch, dtype)) for shape, dtype in results]


def _tensor(x: Any) -> Tensor:
    """A tensor, or one made of a size that varies without asking for its number."""
    return x if isinstance(x, torch.Tensor) else torch.scalar_tensor(x, dtype=_DTYPES[type(x)])


_DTYPES = {torch.SymInt: torch.int64, torch.SymFloat: torch.float64, torch.SymBool: torch.bool}


def _to_numpy(x: Tensor) -> Any:
    x = x.detach().cpu()
    if x.dtype is torch.bfloat16:  # NumPy has it from a library, which torch does not know
        return x.float().numpy().astype("bfloat16")
    return x.numpy().copy()


def _from_numpy(x: Any) -> Tensor:
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.astype("float32")).bfloat16()
    return torch.from_numpy(np.array(x))


_library = torch.library.Library("trainstep", "FRAGMENT")
_library.define("host(Tensor token, int number, str results, Tensor[] values) -> Tensor[]")


def _run(token: Tensor, number: int, results: str, values: Sequence[Tensor]) -> list[Tensor]:
    if active() is not None:  # being recorded, which computes with real values
        return [token.clone(), *_zeros(json.loads(results))]
    outs = _hosts[number].fn(list(map(_to_numpy, values)))
    return [token.clone(), *map(_from_numpy, outs)]


def _shapes(token: Tensor, number: int, results: str, values: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(token), *_zeros(json.loads(results))]


_library.impl("host", _run, "CompositeExplicitAutograd")
torch.library.register_fake("trainstep::host", _shapes, lib=_library)
_operation = torch.ops.trainstep.host.default
