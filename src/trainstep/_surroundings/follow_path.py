"""Resolves a path: from a name in a piece of code, through attributes and keys, to a place."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

from trainstep._common import user_code
from trainstep._surroundings.code_model import Frame, Path
from trainstep._surroundings.flax_objects import is_flax
from trainstep._surroundings.places import Expressions, Place, read_at
from trainstep._surroundings.value_kinds import (
    GONE,
    class_attribute,
    has_part,
    is_callback,
    is_data,
    is_module,
    is_plain_attribute,
    is_users_function,
)


class PathFollower:
    """Resolves paths. Abstract: a subclass implements the callbacks `_on_passed` and `_on_run`.

    A subclass and not a listener object: the two would form a reference cycle, which would keep
    every object that was found alive until a garbage collection.
    """

    def __init__(self) -> None:
        self._expressions = Expressions()

    def _on_passed(self, place: Place) -> None:
        """Called with every place on a path."""
        raise NotImplementedError

    def _on_run(self, owner: Place, fn: Any) -> None:
        """Called with a user's method that resolving a path would run, and its object."""
        raise NotImplementedError

    def _expanded(self, path: Path, frame: Frame, code: types.CodeType) -> list[Path]:
        """One path for each item of a container that a path iterates (`for c in cfgs: c.alpha`)."""
        kinds = [kind for kind, _ in path.steps]
        if "each" not in kinds:
            return [path]
        place = kinds.index("each")
        before, after = path._replace(steps=path.steps[:place]), path.steps[place + 1 :]
        owner = self._follow(before, frame, code, 0)
        if owner is None or not isinstance(owner.value, (list, tuple)) or len(owner.value) > 64:
            return [before]
        steps = [(*before.steps, ("item", i), *after) for i in range(len(owner.value))]
        found = [self._expanded(path._replace(steps=each), frame, code) for each in steps]
        return [before, *(each for paths in found for each in paths)]

    def _follow(self, path: Path, frame: Frame, code: types.CodeType, line: int) -> Place | None:
        """The place at the end of a path; None if it is in a library, or unknown."""
        place: Place | None
        if path.scope == "global":
            if path.name not in frame.globals:
                return None
            place = self._expressions.globals(frame.globals, path.name, frame.globals[path.name])
        else:
            place = (frame.cells if path.scope == "free" else frame.locals).get(path.name)
        for kind, key in path.steps:
            if place is None or kind == "each":
                return None
            self._on_passed(read_at(place, code, line))
            if is_data(place.value) and not has_part(place.value, kind, key):
                break  # `table.shape`, `weights[i]`: the whole value is captured
            found = self._attribute(place, key) if kind == "attr" else self._item(place, key)
            if found is place:
                break  # a library's descriptor may read any part of the object
            place = found
        return None if place is None else read_at(place, code, line)

    def _item(self, place: Place, key: Any) -> Place | None:
        if not isinstance(place.value, (Mapping, list, tuple)):
            return None
        try:
            return self._expressions.item(place, key, place.value[key])
        except (KeyError, IndexError, TypeError):
            return None

    def _attribute(self, place: Place, name: str) -> Place | None:
        """The place of an attribute; the owner's place if a library's descriptor computes it."""
        value = place.value
        if is_module(value):
            found = vars(value).get(name, GONE)
            known = user_code.is_users_module(value) or is_callback(found)
            return (
                self._expressions.attribute(place, name, found)
                if known and found is not GONE
                else None
            )
        own = class_attribute(value, name)
        if isinstance(own, (property, functools.cached_property)):
            getter = own.fget if isinstance(own, property) else own.func
            if not is_users_function(getter):
                return place
            self._on_run(place, getter)
            return None
        if name in getattr(value, "__dict__", ()) and not isinstance(value, type):
            return self._expressions.attribute(place, name, getattr(value, name))
        wrapped = getattr(own, "__wrapped__", None)
        compiled = hasattr(type(own), "warm_up") and isinstance(wrapped, types.FunctionType)
        if compiled or (is_flax(value) and is_users_function(wrapped)):
            self._on_run(place, wrapped)  # the method inside the wrapper
            return None
        if isinstance(own, (staticmethod, classmethod, types.FunctionType)):
            called = _bind(own, value)
            return (
                self._expressions.attribute(place, name, called)
                if is_users_function(called)
                else place
            )
        if is_plain_attribute(value, own):
            found = getattr(value, name, GONE)
            return None if found is GONE else self._expressions.attribute(place, name, found)
        return None


def _bind(own: Any, value: Any) -> Any:
    """Binds a class's function to an instance or to the class, as attribute access does."""
    if isinstance(own, staticmethod):
        return own.__func__
    if isinstance(own, classmethod):
        return types.MethodType(own.__func__, value if isinstance(value, type) else type(value))
    return own if isinstance(value, type) else types.MethodType(own, value)
