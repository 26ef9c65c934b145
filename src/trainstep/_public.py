"""All public names that need Keras."""

from trainstep._accelerate import accelerate, restore
from trainstep._cache import set_cache
from trainstep._errors import (
    ArgumentError,
    ControlFlowError,
    ForeignTraceError,
    GradientError,
    NonFiniteError,
    RetraceLimitError,
    SideEffectError,
    SideEffectWarning,
    SizesWarning,
    StaleCaptureError,
    StaleCaptureWarning,
    StateError,
    TrainstepError,
)
from trainstep._function import Function, function
from trainstep._grad import clip_by_global_norm, global_norm, grad, value_and_grad
from trainstep._host import callback, print
from trainstep._inspect import Inspection
from trainstep._ledger import Ledger, TraceEvent, ledger
from trainstep._logs import Logs
from trainstep._shapes import Shapes
from trainstep._spec import Spec
from trainstep._trainer import Trainer
from trainstep._verify import Verification

__all__ = [
    "ArgumentError",
    "ControlFlowError",
    "ForeignTraceError",
    "Function",
    "GradientError",
    "Inspection",
    "Ledger",
    "Logs",
    "NonFiniteError",
    "RetraceLimitError",
    "Shapes",
    "SideEffectError",
    "SideEffectWarning",
    "SizesWarning",
    "Spec",
    "StaleCaptureError",
    "StaleCaptureWarning",
    "StateError",
    "TraceEvent",
    "Trainer",
    "TrainstepError",
    "Verification",
    "accelerate",
    "callback",
    "clip_by_global_norm",
    "function",
    "global_norm",
    "grad",
    "ledger",
    "print",
    "restore",
    "set_cache",
    "value_and_grad",
]
