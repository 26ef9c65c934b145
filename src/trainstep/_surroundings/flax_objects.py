"""What Flax runs of the modules that a step uses, which it wraps, copies and calls itself."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from trainstep._surroundings.value_kinds import member

_HOMES = ("flax.linen.module", "flax.nnx.pytreelib")
_METHODS = ("__call__", "setup")
_KEPT = (list, tuple, dict)


def is_flax(value: Any) -> bool:
    """Whether a value is a module of Flax's, or a class of them."""
    kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
    return any(kind.__module__ in _HOMES for kind in kinds)


def modules(value: Any) -> Iterator[Any]:
    """A module and those in it; a class by itself."""
    waiting, known = [value], set()
    while waiting:
        each = waiting.pop()
        if id(each) in known:
            continue
        known.add(id(each))
        if isinstance(each, _KEPT):
            waiting += each.values() if isinstance(each, dict) else each
        elif is_flax(each):
            yield each
            if not isinstance(each, type):
                waiting += [v for name, v in vars(each).items() if not name.startswith("_")]


def called_by_flax(value: Any) -> Iterator[types.FunctionType]:
    """The methods that Flax runs of a module, without what it puts around them."""
    for name in _METHODS:
        own = member(value, name)
        own = getattr(own, "__wrapped__", own)
        if isinstance(own, types.FunctionType):
            yield own
