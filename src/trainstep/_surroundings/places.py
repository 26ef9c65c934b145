"""Places: values that a step reaches in Python around it, and what they are to it."""

from __future__ import annotations

import enum
import random
import types
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value is found, and what it was when it was looked at.

    One without a text is followed and not watched: part of an argument that the program has as an
    input, or is compiled for.
    """

    label: str
    text: str
    value: Any
    file: str = ""
    line: int = 0
    owned: bool = False  # an attribute of a layer or the like, read by Keras

    @property
    def site(self) -> str:
        """The user's line that reads it."""
        return user_code.name(self.file, self.line) if self.file else ""


@dataclass(frozen=True, slots=True)
class Given:
    """An argument whose parts are inputs of the program, as those of a tree of JAX's are."""

    value: Any


@dataclass(frozen=True, slots=True)
class Write:
    """Something outside a step that its code changes."""

    owner: Place | None  # None: a name
    key: tuple[str, Any]  # ("attr", "alpha"), ("item", "lr"), ("call", "append"), ("name", "n")
    place: Place


def further(place: Place, text: str, value: Any, shown: str | None = None) -> Place:
    """A place that is reached from another by some more text; `shown` is what a person reads."""
    added = text if shown is None else shown
    quoted = place.label.endswith("`")
    longer = f"{place.label[:-1]}{added}`" if quoted else place.label + added
    return Place(longer, place.text and place.text + text, value, place.file, place.line)


def at(place: Place, code: types.CodeType, line: int) -> Place:
    return Place(place.label, place.text, place.value, code.co_filename, line, place.owned)


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
