"""What PyTorch measured of a compilation, and which backend it was for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

from trainstep._doctor.records import Trace

_MARKING = ("inductor", "aot", "cudagraphs")  # backends that leave a mark in the graph of a loss
_COMPILED = "__compiled_fn"  # how PyTorch names a graph among the globals of the user's module
_CACHES = ("inductor_fx_local_cache", "inductor_fx_remote_cache")


def leaves_mark(backend: Any) -> bool:
    """Whether a loss that a backend's program made can be told from another."""
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", "")
    return str(name).startswith(_MARKING)


def metrics_of(utils: Any, number: str) -> Any:
    """What PyTorch measured for a program."""
    for each in reversed(utils.get_compilation_metrics()):
        if each.compile_id == number and each.is_forward is not False:
            return each
    return None


def measure(trace: Trace, metrics: Any, seconds: float) -> None:
    """Says what a trace cost: of what PyTorch measured, each part includes the next."""
    names = ("dynamo", "aot_autograd", "inductor")
    told = [getattr(metrics, f"{each}_cumulative_compile_time_us", None) for each in names]
    whole, lower, made = ((each or 0) / 1e6 for each in told)
    whole = whole or seconds
    parts = {"trace": whole - lower, "lower": lower - made, "compile": made}
    trace.seconds = {name: round(took, 6) for name, took in parts.items() if took > 0}
    hits, misses = (
        sum(getattr(metrics, f"{cache}_{count}_count", None) or 0 for cache in _CACHES)
        for count in ("hit", "miss")
    )
    trace.from_disk = hits > 0 and not misses


def time_first_run(
    trace: Trace, code: Any, names: dict[str, Any], again: Callable[[], None]
) -> None:
    """Puts a timer before the graph that a new program calls, for one call.

    Args:
        trace: What is to be told of it.
        code: The program.
        names: The globals of the user's module, where the program finds its graph.
        again: Notes the trace once more.
    """
    dynamo = sys.modules["torch._dynamo"]
    again = dynamo.disable(again)
    for name in getattr(code, "co_names", ()):
        graph = names.get(name) if name.startswith(_COMPILED) else None
        if graph is not None:
            names[name] = _timer(trace, graph, names, name, again)
            dynamo.eval_frame.skip_code(names[name].__code__)  # it is not to be compiled itself


def _timer(trace: Trace, graph: Any, names: dict[str, Any], name: str, again: Any) -> Any:
    def timed(*args: Any, **kwargs: Any) -> Any:
        if name in names:
            names[name] = graph
        began = perf_counter()
        results = graph(*args, **kwargs)
        took = trace.seconds.get("first_run", 0.0) + perf_counter() - began
        trace.seconds["first_run"] = round(took, 6)
        again()
        return results

    return timed
