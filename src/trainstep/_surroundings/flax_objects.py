"""The methods that Flax runs of a step's modules, which it wraps, copies and calls itself."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from trainstep._surroundings.value_kinds import class_attribute

_HOMES = ("flax.linen.module", "flax.nnx.pytreelib")
_METHODS = ("__call__", "setup")
_CONTAINERS = (list, tuple, dict)


def is_flax(value: Any) -> bool:
    """Whether a value is a Flax module, or a class of Flax modules."""
    kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
    return any(kind.__module__ in _HOMES for kind in kinds)


def modules(value: Any) -> Iterator[Any]:
    """A module and its submodules; a class alone."""
    waiting, known = [value], set()
    while waiting:
        each = waiting.pop()
        if id(each) in known:
            continue
        known.add(id(each))
        if isinstance(each, _CONTAINERS):
            waiting += each.values() if isinstance(each, dict) else each
        elif is_flax(each):
            yield each
            if not isinstance(each, type):
                waiting += [v for name, v in vars(each).items() if not name.startswith("_")]


def called_by_flax(value: Any) -> Iterator[types.FunctionType]:
    """The methods of a module that Flax runs, without Flax's wrappers."""
    for name in _METHODS:
        own = class_attribute(value, name)
        own = getattr(own, "__wrapped__", own)
        if isinstance(own, types.FunctionType):
            yield own
