"""What values are to a step: data, containers, functions of the user's, generators."""

from __future__ import annotations

import enum
import random
import types
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from trainstep._common import user_code

CONTAINERS = (list, dict, set, deque)
SCALARS = (bool, int, float, complex, str, bytes, type(None), enum.Enum, np.generic, np.dtype)
GONE: Any = object()  # what is found where there is nothing
# Methods that change a container.
CHANGES = frozenset(
    [
        "append",
        "appendleft",
        "extend",
        "insert",
        "add",
        "update",
        "pop",
        "popitem",
        "popleft",
        "remove",
        "discard",
        "clear",
        "setdefault",
        "sort",
        "reverse",
    ]
)


def is_data(value: Any) -> bool:
    """Whether a value is one that a step computes with, and no object with parts of its own."""
    if isinstance(value, (*SCALARS, *CONTAINERS, tuple, frozenset, np.ndarray)):
        return True
    return hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type)


def leads_on(value: Any, kind: str, key: Any) -> bool:
    """Whether a step leads to a part of a container or of a named tuple."""
    if kind == "item":
        return isinstance(value, (Mapping, list, tuple))
    return isinstance(value, tuple) and key in getattr(value, "_fields", ())


def is_users_function(value: Any) -> bool:
    fn = value.__func__ if isinstance(value, types.MethodType) else value
    return isinstance(fn, types.FunctionType) and user_code.is_users_file(fn.__code__)


def items(value: Any) -> Iterable[tuple[Any, Any]]:
    if len(value) > 64:
        return ()
    return list(value.items()) if isinstance(value, dict) else list(enumerate(value))


def member(value: Any, name: str) -> Any:
    """What the class of an object, or a class and its bases, have under a name, as it is there."""
    kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
    return next((vars(kind)[name] for kind in kinds if name in vars(kind)), None)


def is_plain(value: Any, found: Any) -> bool:
    """Whether what a class has is a slot, a field of a named tuple, or a plain value."""
    if isinstance(value, tuple) or isinstance(found, types.MemberDescriptorType):
        return True
    return found is not None and not hasattr(type(found), "__get__")


def is_module(value: Any) -> bool:
    """Whether a value is a module: what is in it is what counts."""
    return isinstance(value, types.ModuleType)


def is_generator(value: Any) -> bool:
    """Whether a value is a source of random numbers with a state of its own."""
    return isinstance(value, (random.Random, np.random.Generator, np.random.RandomState))


def is_callback(value: Any) -> bool:
    """Whether a value is `callback` or `print` of ours, which run at every step."""
    return getattr(value, "__module__", "") == "trainstep._function.inside.host_calls"
