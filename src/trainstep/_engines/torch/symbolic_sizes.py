"""Sizes that vary, for a torch step that is recorded once: symbols in place of numbers.

The step runs on tensors that have a shape and no values; a named axis has a symbol for its size,
one for each name. torch notes what Python and its own code find out about a symbol (`n > 8`), and
these guards tell for which other sizes the record holds:

    axes --> symbols --> stand-ins --(the step runs)--> guards --> violated_assumption(sizes)

Where the number itself is asked for (`range(n)`, `int(n)`) the record would hold for that size
only, and is given up on the spot, with the line that asked in its traceback.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import sympy
import torch
from keras.src.backend.common import dtypes as keras_dtypes
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

from trainstep._common import user_code
from trainstep._common.errors import TrainstepError
from trainstep._engines.contract import Axes, Refused, Sizes, Tensor
from trainstep._engines.shared.patching import replaced
from trainstep._engines.torch.size_shims import Shims, any_kernel, module
from trainstep._engines.torch.trace_guard import TensorValueNeeded
from trainstep._state.control_flow import Uncompilable

# What a symbol stands for while the step runs; no memory has that size. Primes, as layers are not
# wide, and large enough for a network that halves an axis some times.
_HINTS = (251, 241, 239, 233, 229, 227, 223, 211)
# Some of these sizes fit where any other than the hint's own does.
_OTHERS = [sympy.Integer(n) for n in (*range(2, 98), 128, 160, 200, 1000, 1001, 1009, 1024, 4096)]


class VaryingSizes:
    """The symbols of one trace.

    Args:
        axes: Names of sizes, by array and axis.
    """

    def __init__(self, axes: Axes) -> None:
        self._axes = axes
        self._env = _Env(duck_shape=False)
        self._mode = FakeTensorMode(shape_env=self._env, allow_non_fake_inputs=True)
        names = dict.fromkeys(name for array in axes for name in array if name is not None)
        if len(names) > len(_HINTS):
            raise Refused(f"more than {len(_HINTS)} sizes that vary")
        self._hints = dict(zip(names, _HINTS, strict=False))
        self._sizes = {name: self._size(name, hint) for name, hint in self._hints.items()}

    def _size(self, name: str, hint: int) -> Any:
        source = ConstantSource(name)
        symbol = self._env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
        self._env.names[symbol] = _named(name)
        return self._env.create_symintnode(symbol, hint=hint, source=source)

    def copy(self, tensor: Tensor) -> Tensor:
        """What a clone of a tensor would be, without values; its sizes do not vary."""
        return self._mode.from_tensor(tensor.detach(), static_shapes=True).clone()

    def record(self, fn: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
        """Runs `fn` on stand-ins for tensors; returns the module of what it did.

        Raises:
            Refused: If it cannot be recorded so.
        """

        def shimmed(*args: Any) -> Any:
            with Shims(), any_kernel(self._env):
                return fn(*args)

        with self._recording():
            stand_ins = [self._stand_in(*pair) for pair in zip(tensors, self._axes, strict=True)]
            recorded = make_fx(shimmed, tracing_mode="symbolic")(*stand_ins)
        del recorded.shape_env
        for node in recorded.graph.nodes:
            node.meta.clear()  # stand-ins, which hold all of the trace
        return recorded

    def _stand_in(self, tensor: Tensor, names: Sequence[str | None]) -> Tensor:
        """A tensor without values like this one, with symbols for the sizes that vary."""
        shape = [
            size if name is None else self._sizes[name]
            for size, name in zip(tensor.shape, names, strict=True)
        ]
        with self._mode:
            return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        """Makes what goes wrong inside a refusal, unless it would go wrong at any size."""
        types = keras_dtypes.PYTHON_DTYPES_MAP
        # Harmless to other threads: who has no symbols asks for no such key.
        types[torch.SymInt], types[torch.SymFloat] = types[int], types[float]
        _local.recording = True
        texts = [(torch.SymInt, name, _stopped_text) for name in ("__str__", "__repr__")]
        try:
            with replaced(texts):
                yield
        except (Refused, Uncompilable, TrainstepError, TensorValueNeeded):
            raise
        except Exception as error:
            raise Refused(_first_refusal(error)) from error
        finally:
            _local.recording = False
            types.pop(torch.SymInt), types.pop(torch.SymFloat)
            # torch keeps the last expressions that it evaluated, and with them the whole trace.
            ShapeEnv._inner_evaluate_expr.cache_clear()
            ShapeEnv.guard_or_defer_runtime_assert.cache_clear()

    def assumptions(self) -> Callable[[Sizes], str]:
        """What tells of other sizes whether all that the trace found out holds for them.

        Raises:
            Refused: If it holds for one size only, or cannot be told.
        """
        self._env.refuse_constants()
        if self._env.deferred_runtime_asserts:
            raise Refused("a size that depends on values")
        # torch takes 0 and 1 for constants, and says so in the bounds only. They come first, for a
        # guard may make no sense outside of them, and last as the guards have made them.
        assumed = {sympy.Ge(name, 2): "" for name in self._env.names.values()}
        assumed |= self._env.sites
        for symbol, name in self._env.names.items():
            bounds = self._env.var_to_range[symbol]
            assumed.setdefault(sympy.Ge(name, bounds.lower), "")
            if bounds.upper.is_Integer:
                assumed.setdefault(sympy.Le(name, bounds.upper), "")
        names = {name: _named(name) for name in self._hints}

        def violated_assumption(sizes: Sizes) -> str:
            numbers = {symbol: sympy.Integer(sizes[name]) for name, symbol in names.items()}
            found = (_text(e) + where for e, where in assumed.items() if not _holds(e, numbers))
            return next(found, "")

        wrong = violated_assumption(self._hints)
        if wrong:
            raise Refused(f"what torch noted of the sizes, {wrong}, is not so where it was noted")
        return violated_assumption


_local = threading.local()


def _stopped_text(original: Any) -> Any:
    """Stops the user's own Python from using a size as text, unless that is only shown."""

    def text(self: Any) -> Any:
        users = getattr(_local, "recording", False) and user_code.is_outside(sys._getframe(1))
        if users and not user_code.is_shown():
            raise Refused("Python uses the text of a size that varies")
        return original(self)

    return text


class _Env(ShapeEnv):  # type: ignore[misc]
    """Symbols, and what is found out about them; raises as soon as that leaves one size only."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.names: dict[Any, Any] = {}  # what a reader knows the symbols by
        self.sites: dict[Any, str] = {}  # what was found out, and the user's line
        self._checked = 0

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        """Answers a question about symbols."""
        answer = super().evaluate_expr(*args, **kwargs)
        self.refuse_constants()
        return answer

    def refuse_constants(self) -> None:
        """Raises `Refused` if the last guards say that a symbol is one number."""
        for guard in self.guards[self._checked :]:
            expression = guard.expr.xreplace(self.names)
            if isinstance(expression, sympy.Eq) and not any(
                _holds(expression, dict.fromkeys(expression.free_symbols, number))
                for number in _OTHERS
            ):
                raise Refused(f"`{_text(expression.lhs)}` is needed as a number{_asker()}")
            self.sites.setdefault(expression, f" ({user_code.here()})")
            self._checked += 1


def _asker() -> str:
    """Who asks now: the innermost line that is neither torch's nor ours, and the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and module(frame) in ("torch", "trainstep", "sympy"):
        frame = frame.f_back
    if frame is None:
        return ""
    site = user_code.caller()
    if module(frame) != "keras":
        return f" at {site}"
    return f" by {frame.f_globals['__name__']}.{frame.f_code.co_name}, from {site}"


def _first_refusal(error: BaseException) -> str:
    """The refusal behind an error that Keras or torch made of it, or else the error itself."""
    found = error
    while not isinstance(found, Refused):
        behind = found.__cause__ or found.__context__
        if behind is None:
            # Keras puts the name of the layer, and an empty line, before a message.
            return f"{type(found).__name__}: {str(found).strip().partition(chr(10))[0]}"
        found = behind
    return str(found)


def _named(name: str) -> Any:
    return sympy.Symbol(name, positive=True, integer=True)


def _holds(assumed: Any, numbers: dict[Any, Any]) -> bool:
    try:
        return assumed.xreplace(numbers) is sympy.true
    except (ArithmeticError, AssertionError):  # it has no meaning for these numbers
        return False


def _text(assumed: Any) -> str:
    return str(PythonPrinter().doprint(assumed))
