"""Where a path leads: from a name in a piece of code, by attributes and keys, to a place."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

from trainstep._common import user_code
from trainstep._surroundings.code_model import Frame, Path
from trainstep._surroundings.flax_objects import is_flax
from trainstep._surroundings.places import Names, Place, at
from trainstep._surroundings.value_kinds import (
    GONE,
    is_callback,
    is_data,
    is_module,
    is_plain,
    is_users_function,
    leads_on,
    member,
)


class Paths:
    """Follows paths. Abstract: what is met on the way is told to whoever inherits from it.

    No object of its own that is told, since the two would hold each other, and what they met.
    """

    def __init__(self) -> None:
        self._names = Names()

    def _passing(self, place: Place) -> None:
        """Told of every place on the way."""
        raise NotImplementedError

    def _ran(self, owner: Place, fn: Any) -> None:
        """Told of a method of the user's that is run on the way, and of its object."""
        raise NotImplementedError

    def _expanded(self, path: Path, frame: Frame, code: types.CodeType) -> list[Path]:
        """A path by way of the items of a container (`for c in cfgs: c.alpha`): one for each."""
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
        """Where a path leads, or None if it leads into a library or to something unknown."""
        place: Place | None
        if path.scope == "global":
            if path.name not in frame.globals:
                return None
            place = self._names.globals(frame.globals, path.name, frame.globals[path.name])
        else:
            place = (frame.cells if path.scope == "free" else frame.locals).get(path.name)
        for kind, key in path.steps:
            if place is None or kind == "each":
                return None
            self._passing(at(place, code, line))
            if is_data(place.value) and not leads_on(place.value, kind, key):
                break  # `table.shape`, `weights[i]`: the whole of it counts
            found = self._attribute(place, key) if kind == "attr" else self._item(place, key)
            if found is place:
                break  # a library's class reads what it likes of its object
            place = found
        return None if place is None else at(place, code, line)

    def _item(self, place: Place, key: Any) -> Place | None:
        if not isinstance(place.value, (Mapping, list, tuple)):
            return None
        try:
            return self._names.item(place, key, place.value[key])
        except (KeyError, IndexError, TypeError):
            return None

    def _attribute(self, place: Place, name: str) -> Place | None:
        """An attribute; the place itself if a library's class makes something of it."""
        value = place.value
        if is_module(value):
            found = vars(value).get(name, GONE)
            known = user_code.is_users_module(value) or is_callback(found)
            return (
                self._names.attribute(place, name, found) if known and found is not GONE else None
            )
        own = member(value, name)
        if isinstance(own, (property, functools.cached_property)):
            getter = own.fget if isinstance(own, property) else own.func
            if not is_users_function(getter):
                return place
            self._ran(place, getter)
            return None
        if name in getattr(value, "__dict__", ()) and not isinstance(value, type):
            return self._names.attribute(place, name, getattr(value, name))
        wrapped = getattr(own, "__wrapped__", None)
        compiled = hasattr(type(own), "warm_up") and isinstance(wrapped, types.FunctionType)
        if compiled or (is_flax(value) and is_users_function(wrapped)):
            self._ran(place, wrapped)  # a method behind what was put around it
            return None
        if isinstance(own, (staticmethod, classmethod, types.FunctionType)):
            called = _bound(own, value)
            return (
                self._names.attribute(place, name, called) if is_users_function(called) else place
            )
        if is_plain(value, own):
            found = getattr(value, name, GONE)
            return None if found is GONE else self._names.attribute(place, name, found)
        return None


def _bound(own: Any, value: Any) -> Any:
    """What a method of a class is, taken from an instance of it or from the class."""
    if isinstance(own, staticmethod):
        return own.__func__
    if isinstance(own, classmethod):
        return types.MethodType(own.__func__, value if isinstance(value, type) else type(value))
    return own if isinstance(value, type) else types.MethodType(own, value)
