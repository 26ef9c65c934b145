"""Flax: finds the user's code and names behind the functions that Flax passes to JAX.

For a linen module, JAX compiles `apply`; the user's code is in the module's methods. nnx splits
modules into one structure and numbered arrays; here each attribute gets its name back. Plain
attributes are static parts of the signature, variables are inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType, MethodType
from typing import Any

from trainstep._common import user_code
from trainstep._doctor.hooks.call_sites import frames_outward
from trainstep._doctor.hooks.function_identity import one_line
from trainstep._doctor.hooks.nearest import array_part
from trainstep._explain.signature import Part

_COMPILING = "flax.nnx.transforms.compilation"
_OWN = "_pytree__"  # prefix of nnx's own attributes in a module


def module_of(fn: Any) -> Any:
    """The linen module whose `apply` or `init` this function is; None for other functions."""
    if "flax" not in sys.modules or not isinstance(fn, MethodType):
        return None
    from trainstep._surroundings.flax_objects import is_flax

    return None if user_code.is_users_file(fn.__code__) or not is_flax(fn.__self__) else fn.__self__


def display_name(fn: Any) -> str:
    """The name of `apply` or `init` of a module."""
    return f"{fn.__name__} of {type(fn.__self__).__name__}"


def code_in(module: Any) -> CodeType | None:
    """The code of the user's method that Flax calls in a module."""
    from trainstep._surroundings.flax_objects import called_by_flax

    return next((method.__code__ for method in called_by_flax(module)), None)


def given(fn: Any, frame: FrameType) -> Sequence[Any] | None:
    """The user's arguments of a function that nnx compiles; None for other functions."""
    if type(fn).__module__ != _COMPILING:
        return None
    found = None
    for each in frames_outward(frame):
        if user_code.is_users(each):
            break
        if each.f_globals.get("__name__") == _COMPILING and "args" in each.f_locals:
            found = each.f_locals["args"]  # the outermost frame has them unsplit
    return found


def is_part_of_module(label: str) -> bool:
    """Whether a label is that of a numbered array of an nnx module."""
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
                yield Part(path, one_line(held, 40), "static", repr(held))
            elif hasattr(held, "get_raw_value"):
                # The type that JAX uses: it converts NumPy's float64 to float32.
                yield array_part(path, sys.modules["jax"].typeof(held.get_raw_value()))
            else:
                waiting.append((path, held))
