"""One compiled training step for Keras 3, on JAX, TensorFlow and PyTorch.

Importing this package imports nothing else: each name imports Keras, and the engine that it runs
on, when it is first used. So `trainstep doctor` can run a script that uses no Keras, or that
chooses its engine itself. `__init__.pyi` has the same names for type checkers.
"""

import importlib as _importlib
import typing as _typing

from trainstep._common.version import __version__ as __version__

_HOMES = {
    "trainstep._common.disk_cache": ("set_cache",),
    "trainstep._common.errors": (
        "ArgumentError",
        "CheckpointError",
        "ControlFlowError",
        "ForeignTraceError",
        "GradientError",
        "NonFiniteError",
        "ProcessLostError",
        "RetraceLimitError",
        "SideEffectError",
        "SideEffectWarning",
        "SizesWarning",
        "StaleCaptureError",
        "StaleCaptureWarning",
        "StateError",
        "StrategyError",
        "TrainstepError",
    ),
    "trainstep._distribution.processes": (
        "Processes",
        "initialize",
    ),
    "trainstep._distribution.strategy": (
        "Mirrored",
        "Sharded",
        "Single",
        "Strategy",
    ),
    "trainstep._doctor": ("doctor",),
    "trainstep._explain.ledger": (
        "Ledger",
        "TraceEvent",
        "ledger",
    ),
    "trainstep._function.decorator": ("function",),
    "trainstep._function.function": ("Function",),
    "trainstep._function.inside.gradients": (
        "clip_by_global_norm",
        "global_norm",
        "grad",
        "value_and_grad",
    ),
    "trainstep._function.inside.host_calls": (
        "callback",
        "print",
    ),
    "trainstep._function.sizes.policy": ("Shapes",),
    "trainstep._function.spec": ("Spec",),
    "trainstep._function.verify": ("Verification",),
    "trainstep._trainer.accelerate": (
        "accelerate",
        "restore",
    ),
    "trainstep._trainer.checkpoints": ("Checkpoints",),
    "trainstep._trainer.inspect": ("Inspection",),
    "trainstep._trainer.logs": ("Logs",),
    "trainstep._trainer.trainer": ("Trainer",),
}
_HOME_OF = dict(sorted((name, home) for home, names in _HOMES.items() for name in names))
__all__ = list(_HOME_OF)


def __getattr__(name: str) -> _typing.Any:
    if name == "graph":
        return _importlib.import_module("trainstep.graph")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'trainstep' has no attribute {name!r}")
    globals()[name] = found = getattr(_importlib.import_module(_HOME_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return __all__
