"""Kinds of values around a step: data, containers, user functions, generators."""

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
GONE: Any = object()  # stands for a missing value
# The methods that change a container.
MUTATORS = frozenset(
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
    """Whether a value is data: a scalar, a container or an array, and no object with code."""
    if isinstance(value, (*SCALARS, *CONTAINERS, tuple, frozenset, np.ndarray)):
        return True
    return hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type)


def has_part(value: Any, kind: str, key: Any) -> bool:
    """Whether a step of a path selects a part of a container or of a named tuple."""
    if kind == "item":
        return isinstance(value, (Mapping, list, tuple))
    return isinstance(value, tuple) and key in getattr(value, "_fields", ())


def is_users_function(value: Any) -> bool:
    """Whether a value is a function or method that the user wrote."""
    fn = value.__func__ if isinstance(value, types.MethodType) else value
    return isinstance(fn, types.FunctionType) and user_code.is_users_file(fn.__code__)


def few_items(value: Any) -> Iterable[tuple[Any, Any]]:
    """The keys and values of a container; none of one that is too large to analyze."""
    if len(value) > 64:
        return ()
    return list(value.items()) if isinstance(value, dict) else list(enumerate(value))


def class_attribute(value: Any, name: str) -> Any:
    """The raw attribute of an object's class, or of a class, without binding; None if missing."""
    kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
    return next((vars(kind)[name] for kind in kinds if name in vars(kind)), None)


def is_plain_attribute(value: Any, found: Any) -> bool:
    """Whether a class's attribute is a slot, a field of a named tuple, or a plain value."""
    if isinstance(value, tuple) or isinstance(found, types.MemberDescriptorType):
        return True
    return found is not None and not hasattr(type(found), "__get__")


def is_module(value: Any) -> bool:
    """Whether a value is a module: only its attributes are watched."""
    return isinstance(value, types.ModuleType)


def is_generator(value: Any) -> bool:
    """Whether a value is a random number generator of Python or NumPy."""
    return isinstance(value, (random.Random, np.random.Generator, np.random.RandomState))


def is_callback(value: Any) -> bool:
    """Whether a value is `trainstep.callback` or `print`, which run at every step."""
    return getattr(value, "__module__", "") == "trainstep._function.inside.host_calls"
