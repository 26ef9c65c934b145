"""PyTorch: records a step once for dynamic sizes, with symbols for sizes.

The step runs on tensors with shapes but without values; the size of a named axis is a symbol, one
for each name. torch records the comparisons of symbols in Python and in its own code (`n > 8`) as
guards, which determine the sizes for which the record holds:

    axes --> symbols --> stand-ins --(the step runs)--> guards --> violated_assumption(sizes)

If code needs the number itself (`range(n)`, `int(n)`), the record would hold for that size only; it
is refused at once, with that line in the traceback.
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
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from trainstep._common import user_code
from trainstep._common.errors import TrainstepError
from trainstep._common.keras_private import dtypes
from trainstep._engines.contract import Axes, Refused, Sizes, Tensor
from trainstep._engines.shared.patching import replaced
from trainstep._engines.torch.private import symbols
from trainstep._engines.torch.size_shims import Shims, any_kernel, module
from trainstep._engines.torch.trace_guard import TensorValueNeeded
from trainstep._state.control_flow import Uncompilable

_symbols: Any = symbols()  # not None: the engine has asked
_FakeTensorMode = _symbols.fake_tensor.FakeTensorMode
# The values of symbols during the trace; no memory of that size is allocated. Primes, unlike the
# widths of layers, and large enough for a network that halves an axis several times.
_HINTS = (251, 241, 239, 233, 229, 227, 223, 211)
# If a guard holds for any size other than the hint, it holds for one of these.
_OTHERS = [sympy.Integer(n) for n in (*range(2, 98), 128, 160, 200, 1000, 1001, 1009, 1024, 4096)]


class DynamicSizes:
    """The symbols of one trace.

    Args:
        axes: Names of sizes, by array and axis.
    """

    def __init__(self, axes: Axes) -> None:
        self._axes = axes
        self._env = _Env(duck_shape=False)
        self._mode = _FakeTensorMode(shape_env=self._env, allow_non_fake_inputs=True)
        names = dict.fromkeys(name for array in axes for name in array if name is not None)
        if len(names) > len(_HINTS):
            raise Refused(f"more than {len(_HINTS)} dynamic sizes")
        self._hints = dict(zip(names, _HINTS, strict=False))
        self._sizes = {name: self._size(name, hint) for name, hint in self._hints.items()}

    def _size(self, name: str, hint: int) -> Any:
        source = _symbols.source.ConstantSource(name)
        symbol = self._env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
        self._env.names[symbol] = _named(name)
        return self._env.create_symintnode(symbol, hint=hint, source=source)

    def copy(self, tensor: Tensor) -> Tensor:
        """Returns a stand-in for a clone of a tensor, with fixed sizes."""
        return self._mode.from_tensor(tensor.detach(), static_shapes=True).clone()

    def record(self, fn: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
        """Runs `fn` on stand-ins for tensors; returns the recorded module.

        Raises:
            Refused: If it cannot be recorded for dynamic sizes.
        """

        def shimmed(*args: Any) -> Any:
            with Shims(), any_kernel(self._env):
                return fn(*args)

        with self._recording():
            stand_ins = [self._stand_in(*pair) for pair in zip(tensors, self._axes, strict=True)]
            recorded = make_fx(shimmed, tracing_mode="symbolic")(*stand_ins)
        del recorded.shape_env
        for node in recorded.graph.nodes:
            node.meta.clear()  # stand-ins, which keep the whole trace alive
        return recorded

    def _stand_in(self, tensor: Tensor, names: Sequence[str | None]) -> Tensor:
        """Returns a tensor like this one without values, with symbols for dynamic sizes."""
        shape = [
            size if name is None else self._sizes[name]
            for size, name in zip(tensor.shape, names, strict=True)
        ]
        with self._mode:
            return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        """Turns errors in this block into refusals, unless they would occur at any size."""
        types = dtypes.PYTHON_DTYPES_MAP
        # Harmless to other threads: only code with symbols looks up these keys.
        types[torch.SymInt], types[torch.SymFloat] = types[int], types[float]
        _local.recording = True
        texts = [(torch.SymInt, name, _refusing_text) for name in ("__str__", "__repr__")]
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
            # torch caches the last expressions that it evaluated, which keep the whole trace alive.
            ShapeEnv._inner_evaluate_expr.cache_clear()
            ShapeEnv.guard_or_defer_runtime_assert.cache_clear()

    def assumptions(self) -> Callable[[Sizes], str]:
        """Returns a function that checks the guards of the trace for other sizes; see `Traced`.

        Raises:
            Refused: If they hold for one size only, or depend on values.
        """
        self._env.refuse_constants()
        if self._env.deferred_runtime_asserts:
            raise Refused("a size that depends on values")
        # torch treats sizes 0 and 1 as constants, which only the bounds of symbols express. Initial
        # bounds come first, since a guard may be undefined outside; refined bounds come last.
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
            raise Refused(
                f"a guard of torch, {wrong}, does not hold for the sizes of its own trace"
            )
        return violated_assumption


_local = threading.local()


def _refusing_text(original: Any) -> Any:
    """Refuses the text of a size in user code, unless it is only printed or logged."""

    def text(self: Any) -> Any:
        users = getattr(_local, "recording", False) and user_code.is_outside(sys._getframe(1))
        if users and not user_code.is_shown():
            raise Refused("Python uses the text of a dynamic size")
        return original(self)

    return text


class _Env(ShapeEnv):  # type: ignore[misc]
    """Symbols and their guards; refuses a guard that holds for one size only."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.names: dict[Any, Any] = {}  # readable symbols
        self.sites: dict[Any, str] = {}  # guards, with the user's line
        self._checked = 0

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates an expression of symbols, which may add a guard."""
        answer = super().evaluate_expr(*args, **kwargs)
        self.refuse_constants()
        return answer

    def refuse_constants(self) -> None:
        """Raises `Refused` if a new guard fixes a symbol to one number."""
        for guard in self.guards[self._checked :]:
            expression = guard.expr.xreplace(self.names)
            if isinstance(expression, sympy.Eq) and not any(
                _holds(expression, dict.fromkeys(expression.free_symbols, number))
                for number in _OTHERS
            ):
                raise Refused(f"`{_text(expression.lhs)}` is needed as a number{_reader()}")
            self.sites.setdefault(expression, f" ({user_code.here()})")
            self._checked += 1


def _reader() -> str:
    """Describes the code that needs a number: a function of Keras, and the user's line."""
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
    """Returns the text of the refusal that caused an error, or else of the error itself."""
    found = error
    while not isinstance(found, Refused):
        behind = found.__cause__ or found.__context__
        if behind is None:
            # Keras prefixes messages with the name of the layer and an empty line.
            return f"{type(found).__name__}: {str(found).strip().partition(chr(10))[0]}"
        found = behind
    return str(found)


def _named(name: str) -> Any:
    return sympy.Symbol(name, positive=True, integer=True)


def _holds(assumed: Any, numbers: dict[Any, Any]) -> bool:
    try:
        return assumed.xreplace(numbers) is sympy.true
    except (ArithmeticError, AssertionError):  # undefined for these numbers
        return False


def _text(assumed: Any) -> str:
    return str(_symbols.printers.PythonPrinter().doprint(assumed))
