"""Functions as engines get them: wrapped, bound, partial; and which of them are one function."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

from trainstep._doctor.hooks.watcher import weak
from trainstep._doctor.records import Cause

_INNER = ("__wrapped__", "_python_function", "func")
_NNX_GRAD = "grad_wrapper"  # the wrapper of nnx.grad, which has no __wrapped__


def python_function(fn: Any) -> Any:
    """The Python function inside a callable, bound to its object if it is a method."""
    return _unwrapped(fn)[0]


def display_name(fn: Any) -> str:
    """The name of a function: `step`, or `grad of step`."""
    inner, wrappers = _unwrapped(fn)
    code = code_of(inner)
    name = getattr(fn, "__name__", "") or type(fn).__name__ if code is None else code.co_qualname
    return " of ".join([*wrappers, name])


def _unwrapped(fn: Any) -> tuple[Any, list[str]]:
    """The Python function inside a callable, and the transformations around it."""
    wrappers: list[str] = []
    for _ in range(20):
        inner = _inner(fn)
        if inner is None:
            break
        code = code_of(fn)
        if code is not None and "/jax/" in code.co_filename:  # jax.grad and the like
            wrappers.append(_transformation(fn))
        elif code is not None and code.co_name == _NNX_GRAD:
            wrappers.append("gradient")
        fn = inner
    if isinstance(fn, (types.FunctionType, types.MethodType)):
        return fn, wrappers
    call = method_of(fn, "__call__")
    return (types.MethodType(call, fn) if isinstance(call, types.FunctionType) else fn), wrappers


def _transformation(fn: Any) -> str:
    """The name of a JAX transformation: the first words of its docstring."""
    words, of, _ = (fn.__doc__ or "").partition(" of ")
    return words.lower() if of and len(words) < 30 else "transformation"


def _inner(fn: Any) -> Any:
    if isinstance(fn, functools.partial):
        return fn.func
    if isinstance(fn, types.MethodType):
        # TensorFlow binds a method to a wrapper with a weak reference to the object.
        held: Any = fn.__self__
        if not hasattr(type(held), "weakrefself_target__"):
            return None
        method, target = held.weakrefself_func__(), held.target
        return None if target is None else types.MethodType(inspect.unwrap(method), target)
    code = code_of(fn)
    if code is not None and code.co_name == _NNX_GRAD and "f" in code.co_freevars:
        return fn.__closure__[code.co_freevars.index("f")].cell_contents
    own = vars(fn) if hasattr(fn, "__dict__") else {}
    return next((own[name] for name in _INNER if callable(own.get(name))), None)


def method_of(owner: Any, name: str) -> Any:
    """An attribute of an object's class, without running descriptors."""
    return inspect.getattr_static(type(owner), name, None)


def code_of(fn: Any) -> types.CodeType | None:
    """The code of a function or a method."""
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def arguments(found: dict[str, Any]) -> list[Any]:
    """The arguments in the locals of a frame; containers become None, as they hold data."""
    args = found.get("args") or ()
    return [None if isinstance(each, (tuple, list, dict)) else each for each in args]


def one_line(value: Any, width: int = 80) -> str:
    """A value in one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= width else f"{text[: width - 3]}..."


def new_object_cause(fn: Any, number: int, made: str = "") -> Cause:
    """The cause for a trace of a further function object of the same code."""
    if isinstance(fn, types.MethodType):
        kind = type(fn.__self__).__name__
        return Cause("instance", f"method of object number {number} of class `{kind}`{made}")
    return Cause("function", f"function object number {number} of the same definition{made}")


class SeenFunction:
    """A weak reference to a traced function object."""

    def __init__(self, fn: Any, number: int) -> None:
        self.number = number
        self._ref = weak(fn)

    def get(self) -> Any:
        """The function; None if it was deleted."""
        return self._ref()


class FunctionObjects:
    """The traced function objects, by code.

    A loop that defines a function creates many objects of the same code. Such an object counts as a
    separate function only if an earlier one is still alive and differs: a method of another model,
    a closure over another number.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[types.CodeType, str], list[SeenFunction]] = {}

    def number(self, fn: Any, name: str) -> tuple[int, bool]:
        """The number of a function object, counted from 1, and whether it is new."""
        known = self._of(fn, name)
        for each in known:
            held = each.get()
            if held is fn or (isinstance(held, types.MethodType) and held == fn):
                return each.number, False
        known.append(SeenFunction(fn, len(known) + 1))
        return len(known), True

    def is_separate_function(self, fn: Any, name: str) -> bool:
        """Whether a new function object differs from all earlier ones that are alive."""
        earlier = [each.get() for each in self._of(fn, name)[:-1]]
        alive = [each for each in earlier if each is not None]
        return bool(alive) and not any(_is_same(fn, each) for each in alive)

    def _of(self, fn: Any, name: str) -> list[SeenFunction]:
        code = code_of(python_function(fn))
        return [] if code is None else self._known.setdefault((code, name), [])


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, types.MethodType) or isinstance(other, types.MethodType):
        return getattr(one, "__self__", None) is getattr(other, "__self__", None)
    return _captured_ids(one) == _captured_ids(other)


def _captured_ids(fn: Any) -> list[Any]:
    if isinstance(fn, functools.partial):
        return [_captured_ids(fn.func), *map(id, fn.args), *map(id, fn.keywords.values())]
    closure = getattr(fn, "__closure__", None) or ()
    cells = [id(cell.cell_contents) for cell in closure if _is_filled(cell)]
    return [*cells, *map(id, getattr(fn, "__defaults__", None) or ())]


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
