"""Functions as engines get them: wrapped, bound, partial; and which of them are one function."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

from trainstep._doctor._watcher import weak

_INNER = ("__wrapped__", "_python_function", "func")


def innermost(fn: Any) -> Any:
    """The Python function in a callable, bound to its object if it is a method."""
    for _ in range(20):
        inner = _inner(fn)
        if inner is None:
            break
        fn = inner
    if isinstance(fn, (types.FunctionType, types.MethodType)):
        return fn
    call = inspect.getattr_static(type(fn), "__call__", None)
    return types.MethodType(call, fn) if isinstance(call, types.FunctionType) else fn


def _inner(fn: Any) -> Any:
    if isinstance(fn, types.MethodType):
        # TensorFlow binds a method to a thing that holds the object weakly.
        held: Any = fn.__self__
        target = getattr(held, "weakrefself_target__", None)
        if target is not None:
            method = held.weakrefself_func__()
            return types.MethodType(getattr(method, "__wrapped__", method), target)
        return None
    if isinstance(fn, functools.partial):
        return fn.func
    own = vars(fn) if hasattr(fn, "__dict__") else {}
    return next((own[name] for name in _INNER if callable(own.get(name))), None)


def code_of(fn: Any) -> types.CodeType | None:
    """The code of a function or a method."""
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    return code if isinstance(code, types.CodeType) else None


class Known:
    """A function object that was traced, held weakly."""

    def __init__(self, fn: Any, number: int) -> None:
        self.number = number
        self._ref = weak(fn)

    def get(self) -> Any:
        """The function; None if it is gone."""
        return self._ref()


class Objects:
    """The function objects that were traced, by their code.

    A loop that makes a function each time it is run makes objects of one code. Such an object is a
    function in its own right only if an earlier one is still there, and differs: a method of
    another model, a closure over another number.
    """

    def __init__(self) -> None:
        self._known: dict[types.CodeType, list[Known]] = {}

    def number(self, fn: Any) -> tuple[int, bool]:
        """The number of a function object, from 1 on, and whether it is new."""
        code = code_of(fn)
        known = [] if code is None else self._known.setdefault(code, [])
        for each in known:
            held = each.get()
            if held is fn or (isinstance(held, types.MethodType) and held == fn):
                return each.number, False
        known.append(Known(fn, len(known) + 1))
        return len(known), True

    def is_own(self, fn: Any) -> bool:
        """Whether a new function object differs from those before it that are still there."""
        code = code_of(fn)
        earlier = [] if code is None else [each.get() for each in self._known[code][:-1]]
        alive = [each for each in earlier if each is not None]
        return bool(alive) and not any(_same(fn, each) for each in alive)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, types.MethodType) or isinstance(other, types.MethodType):
        return getattr(one, "__self__", None) is getattr(other, "__self__", None)
    return _around(one) == _around(other)


def _around(fn: Any) -> list[int]:
    cells = [id(cell.cell_contents) for cell in fn.__closure__ or () if _is_filled(cell)]
    return [*cells, *map(id, fn.__defaults__ or ())]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None or True
    except ValueError:
        return False
