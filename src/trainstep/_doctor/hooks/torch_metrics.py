"""The cost of a compilation, as PyTorch measured it, and its first run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

from trainstep._doctor.records import Trace

_MARKING = ("inductor", "aot", "cudagraphs")  # backends whose losses have a marked autograd graph
_COMPILED = "__compiled_fn"  # PyTorch's name for a graph in the globals of the user's module
_CACHES = ("inductor_fx_local_cache", "inductor_fx_remote_cache")


def leaves_mark(backend: Any) -> bool:
    """Whether the autograd graph shows that a program of this backend computed a loss."""
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", "")
    return str(name).startswith(_MARKING)


def metrics_of(utils: Any, number: str) -> Any:
    """PyTorch's metrics of a program."""
    for each in reversed(utils.get_compilation_metrics()):
        if each.compile_id == number and each.is_forward is not False:
            return each
    return None


def measure(trace: Trace, metrics: Any, seconds: float) -> None:
    """Fills in the cost of a trace. PyTorch's times are nested: each phase includes the next."""
    names = ("dynamo", "aot_autograd", "inductor")
    times = [getattr(metrics, f"{each}_cumulative_compile_time_us", None) for each in names]
    whole, lower, made = ((each or 0) / 1e6 for each in times)
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
    """Times the first call of the graph of a new program.

    Args:
        trace: The record to complete.
        code: The program.
        names: The globals of the user's module, in which the program looks its graph up.
        again: Rewrites the record.
    """
    dynamo = sys.modules["torch._dynamo"]
    again = dynamo.disable(again)
    for name in getattr(code, "co_names", ()):
        graph = names.get(name) if name.startswith(_COMPILED) else None
        if graph is not None:
            names[name] = _timer(trace, graph, names, name, again)
            dynamo.eval_frame.skip_code(names[name].__code__)  # dynamo must not compile the timer


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
