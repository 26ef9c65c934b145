"""Flax: functions that JAX gets from it, and not from the user.

Of a module of linen, JAX compiles `apply`: the user's function is what the module does. nnx takes
modules apart into one structure and numbered arrays. Here, each attribute has its name: plain ones
are part of what a program is for, variables are inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType, MethodType
from typing import Any

from trainstep._common import user_code
from trainstep._doctor.hooks.call_sites import outwards
from trainstep._doctor.hooks.function_identity import short
from trainstep._doctor.hooks.nearest import array
from trainstep._explain.signature import Part

_COMPILING = "flax.nnx.transforms.compilation"
_OWN = "_pytree__"  # what nnx keeps in a module of the user's


def module_of(fn: Any) -> Any:
    """The module of linen's whose `apply` or `init` a function is; None for another."""
    if "flax" not in sys.modules or not isinstance(fn, MethodType):
        return None
    from trainstep._surroundings.flax_objects import is_flax

    return None if user_code.is_users_file(fn.__code__) or not is_flax(fn.__self__) else fn.__self__


def title(fn: Any) -> str:
    """What such a function is called."""
    return f"{fn.__name__} of {type(fn.__self__).__name__}"


def code_in(module: Any) -> CodeType | None:
    """The code that it is about."""
    from trainstep._surroundings.flax_objects import called_by_flax

    return next((method.__code__ for method in called_by_flax(module)), None)


def given(fn: Any, frame: FrameType) -> Sequence[Any] | None:
    """The arguments as the user gave them; None if the function is not nnx's to call."""
    if type(fn).__module__ != _COMPILING:
        return None
    found = None
    for each in outwards(frame):
        if user_code.is_users(each):
            break
        if each.f_globals.get("__name__") == _COMPILING and "args" in each.f_locals:
            found = each.f_locals["args"]  # the outermost has them as they were
    return found


def is_taken_apart(label: str) -> bool:
    """Whether an array is one of a module, by its number."""
    return ".states[" in label


def parts(names: Sequence[str], values: Sequence[Any]) -> Iterator[Part]:
    """The modules among arguments and their attributes, for a signature."""
    waiting = list(zip(names, values, strict=False))
    known: set[int] = set()
    while waiting:
        label, value = waiting.pop(0)
        nodes = getattr(value, f"{_OWN}nodes", None)
        if nodes is None or id(value) in known:
            continue
        known.add(id(value))
        yield Part(label, f"a {type(value).__name__}", "structure", type(value).__qualname__)
        for name, held in vars(value).items():
            path = f"{label}.{name}"
            if name.startswith(_OWN):
                continue
            if not nodes.get(name):
                yield Part(path, short(held, 40), "static", repr(held))
            elif hasattr(held, "get_raw_value"):
                # As JAX sees it: NumPy's float64 is a float32 there.
                yield array(path, sys.modules["jax"].typeof(held.get_raw_value()))
            else:
                waiting.append((path, held))
