"""Places: values that a step reaches in Python around it, and what they are to it."""

from __future__ import annotations

import enum
import random
import types
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainstep import _site

CONTAINERS = (list, dict, set, deque)
SCALARS = (bool, int, float, complex, str, bytes, type(None), enum.Enum, np.generic, np.dtype)
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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value is found, and what it was when it was looked at."""

    label: str
    text: str
    value: Any
    file: str = ""
    line: int = 0
    owned: bool = False  # an attribute of a layer or the like, read by Keras

    @property
    def site(self) -> str:
        """The user's line that reads it."""
        return _site.name(self.file, self.line) if self.file else ""


@dataclass(frozen=True, slots=True)
class Write:
    """Something outside a step that its code changes."""

    owner: Place | None  # None: a name
    key: tuple[str, Any]  # ("attr", "alpha"), ("item", "lr"), ("call", "append"), ("name", "n")
    place: Place


def further(place: Place | None, text: str, value: Any, label: str = "") -> Place:
    assert place is not None
    longer = f"{place.label[:-1]}{text}`" if place.label.endswith("`") else place.label + text
    return Place(label or longer, place.text + text, value, place.file, place.line)


def at(place: Place, code: types.CodeType, line: int) -> Place:
    return Place(place.label, place.text, place.value, code.co_filename, line, place.owned)


def item(place: Place, key: Any) -> Place | None:
    value = place.value
    if not isinstance(value, (dict, list, tuple)):
        return None
    try:
        return further(place, f"[{key!r}]", value[key])
    except (KeyError, IndexError, TypeError):
        return None


def is_data(value: Any) -> bool:
    """Whether a value is one that a step computes with, and no object with parts of its own."""
    if isinstance(value, (*SCALARS, *CONTAINERS, tuple, frozenset, np.ndarray)):
        return True
    return hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type)


def leads_on(value: Any, kind: str, key: Any) -> bool:
    """Whether a step leads to a part of a container or of a named tuple."""
    if kind == "item":
        return isinstance(value, (dict, list, tuple))
    return isinstance(value, tuple) and key in getattr(value, "_fields", ())


def is_users_function(value: Any) -> bool:
    fn = value.__func__ if isinstance(value, types.MethodType) else value
    return isinstance(fn, types.FunctionType) and _site.is_users_file(fn.__code__)


def items(value: Any) -> Iterable[tuple[Any, Any]]:
    if len(value) > 64:
        return ()
    return list(value.items()) if isinstance(value, dict) else list(enumerate(value))


def is_plain_member(value: Any, name: str) -> bool:
    """Whether an attribute is a slot, a field of a named tuple, or a plain one of the class."""
    found = next((vars(c)[name] for c in type(value).__mro__ if name in vars(c)), None)
    if isinstance(value, type):
        found = next((vars(c)[name] for c in value.__mro__ if name in vars(c)), None)
        return found is not None and not hasattr(type(found), "__get__")
    if isinstance(found, types.MemberDescriptorType) or isinstance(value, tuple):
        return True
    return found is not None and not hasattr(type(found), "__get__")


def is_library(value: Any) -> bool:
    """Whether a value is a module, or a function or class of a library."""
    if isinstance(value, types.ModuleType):
        return True
    if isinstance(value, types.FunctionType):
        return not _site.is_users_file(value.__code__)
    if isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
        return True
    return isinstance(value, type)


def is_generator(value: Any) -> bool:
    """Whether a value is a source of random numbers with a state of its own."""
    return isinstance(value, (random.Random, np.random.Generator, np.random.RandomState))
