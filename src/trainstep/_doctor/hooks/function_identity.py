"""Functions as engines get them: wrapped, bound, partial; and which of them are one function."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

from trainstep._doctor.hooks.watcher import weak
from trainstep._doctor.records import Cause

_INNER = ("__wrapped__", "_python_function", "func")
_NNX_GRAD = "grad_wrapper"  # what nnx.grad makes of a function, which it does not tell of it


def innermost(fn: Any) -> Any:
    """The Python function in a callable, bound to its object if it is a method."""
    return _unwrapped(fn)[0]


def title(fn: Any) -> str:
    """What a function is called: `step`, or `grad of step`."""
    inner, wrappers = _unwrapped(fn)
    code = code_of(inner)
    name = getattr(fn, "__name__", "") or type(fn).__name__ if code is None else code.co_qualname
    return " of ".join([*wrappers, name])


def _unwrapped(fn: Any) -> tuple[Any, list[str]]:
    """The Python function in a callable, and the libraries' functions around it."""
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
    """What JAX makes of a function: the first words of its docstring."""
    words, of, _ = (fn.__doc__ or "").partition(" of ")
    return words.lower() if of and len(words) < 30 else "transformation"


def _inner(fn: Any) -> Any:
    if isinstance(fn, functools.partial):
        return fn.func
    if isinstance(fn, types.MethodType):
        # TensorFlow binds a method to a thing that holds the object weakly.
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
    """What the class of an object has under a name, as it is there."""
    return inspect.getattr_static(type(owner), name, None)


def code_of(fn: Any) -> types.CodeType | None:
    """The code of a function or a method."""
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def arguments(found: dict[str, Any]) -> list[Any]:
    """The arguments among the names of a frame; of structures, what is in them is data."""
    args = found.get("args") or ()
    return [None if isinstance(each, (tuple, list, dict)) else each for each in args]


def short(value: Any, width: int = 80) -> str:
    """A value in one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= width else f"{text[: width - 3]}..."


def another(fn: Any, number: int, made: str = "") -> Cause:
    """A further function object of one code, as the cause of a trace."""
    if isinstance(fn, types.MethodType):
        kind = type(fn.__self__).__name__
        return Cause("instance", f"a method of object number {number} of class `{kind}`{made}")
    return Cause("function", f"function object number {number} of one definition{made}")


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

    A loop that makes a function each time makes objects of one code. Such an object is a
    function in its own right only if an earlier one is still there, and differs: a method of
    another model, a closure over another number.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[types.CodeType, str], list[Known]] = {}

    def number(self, fn: Any, name: str) -> tuple[int, bool]:
        """The number of a function object, from 1 on, and whether it is new."""
        known = self._of(fn, name)
        for each in known:
            held = each.get()
            if held is fn or (isinstance(held, types.MethodType) and held == fn):
                return each.number, False
        known.append(Known(fn, len(known) + 1))
        return len(known), True

    def is_own(self, fn: Any, name: str) -> bool:
        """Whether a new function object differs from those before it that are still there."""
        earlier = [each.get() for each in self._of(fn, name)[:-1]]
        alive = [each for each in earlier if each is not None]
        return bool(alive) and not any(_same(fn, each) for each in alive)

    def _of(self, fn: Any, name: str) -> list[Known]:
        code = code_of(innermost(fn))
        return [] if code is None else self._known.setdefault((code, name), [])


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, types.MethodType) or isinstance(other, types.MethodType):
        return getattr(one, "__self__", None) is getattr(other, "__self__", None)
    return _around(one) == _around(other)


def _around(fn: Any) -> list[Any]:
    if isinstance(fn, functools.partial):
        return [_around(fn.func), *map(id, fn.args), *map(id, fn.keywords.values())]
    closure = getattr(fn, "__closure__", None) or ()
    cells = [id(cell.cell_contents) for cell in closure if _is_filled(cell)]
    return [*cells, *map(id, getattr(fn, "__defaults__", None) or ())]


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
