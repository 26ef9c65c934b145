"""What PyTorch measured of a compilation, and which backend it was for."""

from __future__ import annotations

from typing import Any

from trainstep._doctor._records import Trace

_MARKING = ("inductor", "aot", "cudagraphs")  # backends that leave a mark in the graph of a loss
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
