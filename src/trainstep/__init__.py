"""One compiled training step for Keras 3, on JAX, TensorFlow and PyTorch.

Importing this imports Keras and nothing of an engine besides the one that Keras runs on.
"""

from trainstep._accelerate import accelerate as accelerate
from trainstep._accelerate import restore as restore
from trainstep._cache import set_cache as set_cache
from trainstep._errors import ArgumentError as ArgumentError
from trainstep._errors import ControlFlowError as ControlFlowError
from trainstep._errors import ForeignTraceError as ForeignTraceError
from trainstep._errors import GradientError as GradientError
from trainstep._errors import NonFiniteError as NonFiniteError
from trainstep._errors import RetraceLimitError as RetraceLimitError
from trainstep._errors import SideEffectError as SideEffectError
from trainstep._errors import SideEffectWarning as SideEffectWarning
from trainstep._errors import SizesWarning as SizesWarning
from trainstep._errors import StaleCaptureError as StaleCaptureError
from trainstep._errors import StaleCaptureWarning as StaleCaptureWarning
from trainstep._errors import StateError as StateError
from trainstep._errors import TrainstepError as TrainstepError
from trainstep._function import Function as Function
from trainstep._function import function as function
from trainstep._grad import clip_by_global_norm as clip_by_global_norm
from trainstep._grad import global_norm as global_norm
from trainstep._grad import grad as grad
from trainstep._grad import value_and_grad as value_and_grad
from trainstep._host import callback as callback
from trainstep._host import print as print
from trainstep._inspect import Inspection as Inspection
from trainstep._ledger import Ledger as Ledger
from trainstep._ledger import TraceEvent as TraceEvent
from trainstep._ledger import ledger as ledger
from trainstep._logs import Logs as Logs
from trainstep._shapes import Shapes as Shapes
from trainstep._spec import Spec as Spec
from trainstep._trainer import Trainer as Trainer
from trainstep._verify import Verification as Verification
from trainstep._version import __version__ as __version__

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
