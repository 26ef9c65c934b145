"""Programs that outlive the function object that they were compiled for.

    def train(model, data, optimizer, loss):
        @ts.function
        def step(x, y): ...     # a new function object at every call of `train`

A function with the same code, the same captured Keras objects and the same captured numbers is the
same step. Its programs and its ledger are stored on the model that it captures, until another
captured object is freed; a second call of `train` finds them there. A function that captures
anything else (a list, an object of the user's) may be another step each time, and shares nothing.
"""

from __future__ import annotations

import enum
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

import keras

from trainstep._common.keras_private import KerasVariable
from trainstep._common.user_code import is_users_file
from trainstep._explain.ledger import Ledger
from trainstep._function.inside.nan_guard import Guard, Unguarded, guard
from trainstep._function.program_cache import Programs
from trainstep._function.settings import StepSettings

_ATTRIBUTE = "_trainstep_programs"
_BY_VALUE = (bool, int, float, str, bytes, type(None), enum.Enum)
_BY_IDENTITY = (
    keras.layers.Layer,
    keras.optimizers.Optimizer,
    keras.losses.Loss,
    keras.metrics.Metric,
    keras.random.SeedGenerator,
    KerasVariable,
    types.ModuleType,
    type,
)

Shared = tuple[Programs, Ledger, Guard | Unguarded]


class _SharedPrograms:
    """The programs that are stored on a model."""

    def __init__(self) -> None:
        self.entries: dict[Any, tuple[list[weakref.ref[Any]], Shared]] = {}


def shared(fn: Callable[..., Any], settings: StepSettings, declared: Any) -> Shared:
    """Returns the programs, ledger and guard of a function: those of an equal one, or new ones.

    Args:
        fn: The function.
        settings: Its settings.
        declared: Its declared signature, if any.
    """
    name, policies, shapes = settings.name, settings.policies, settings.shapes
    code = getattr(inspect.unwrap(fn), "__code__", None)
    written = code if code is not None and is_users_file(code) else None
    new = Programs(shapes.max_programs), Ledger(name, written), guard(name, policies.nan_policy)
    captured = _captured(fn)
    owner = next((c for c in captured or () if isinstance(c, keras.Model)), None)
    if captured is None or owner is None:
        return new
    store: _SharedPrograms = vars(owner).setdefault(_ATTRIBUTE, _SharedPrograms())
    objects = [c for c in captured if not isinstance(c, _BY_VALUE) and c is not owner]
    values = tuple((type(c), c) if isinstance(c, _BY_VALUE) else id(c) for c in captured)
    texts = (declared and repr(declared), repr(settings.dynamic), repr(shapes))
    compiled = (settings.options, settings.engine.name, settings.max_traces, *texts)
    key = (getattr(fn, "__code__", None), name, policies, compiled, values)
    found = store.entries.get(key)
    if found is None:
        # The entry is dropped with the first object that is freed, before that id can be reused.
        refs = [weakref.ref(c, lambda _: store.entries.pop(key, None)) for c in objects]
        store.entries[key] = found = (refs, new)
    return found[1]


def _captured(fn: Callable[..., Any]) -> list[Any] | None:
    """Returns the captured values and defaults; None if any of them could change unnoticed."""
    if not isinstance(fn, types.FunctionType) or fn.__closure__ is None:
        return None
    try:
        cells = [cell.cell_contents for cell in fn.__closure__]
    except ValueError:  # a name without a value yet
        return None
    captured = [*cells, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    return captured if all(map(_is_constant, captured)) else None


def _is_constant(x: Any) -> bool:
    if isinstance(x, types.FunctionType):
        return x.__closure__ is None
    return isinstance(x, (*_BY_VALUE, *_BY_IDENTITY))
