"""What a step reaches in Python around it: from names in its code to values, and the way there.

    function --its bytecode--> paths --followed now--> places: a value, an expression that finds it
                                                       again at each call, a name, a line

Only the user's own code is read, not that of libraries: the step, the functions and methods that
it mentions, and those of layers, losses, metrics and optimizers that it calls. Places are found by
expressions that start at a dict of globals, at the step's closure, or at a weak reference: none of
them keeps an object alive.

reached --> what a step's code leads to, before it is traced and after
taken   --> of that, the values that the step read and left alone: they are in the program now
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trainstep._common.structure import structure
from trainstep._surroundings.captures import Captures
from trainstep._surroundings.code_model import CONTENTS, Frame, Spread, bound, cells_of
from trainstep._surroundings.flax_objects import called_by_flax, is_flax, modules
from trainstep._surroundings.keras_objects import called_by_keras, is_keras, parts, settings
from trainstep._surroundings.places import Given, Place, further
from trainstep._surroundings.value_kinds import (
    CONTAINERS,
    SCALARS,
    is_data,
    is_generator,
    is_module,
    is_users_function,
    items,
    member,
)
from trainstep._surroundings.walk_code import Walk

_DEEP = 8  # containers in containers


class Reach(Walk):
    """What was found.

    Attributes:
        places: What is read, by the expression that finds it.
        containers: Lists and the like that are mentioned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, Place] = {}
        self.containers: dict[int, Place] = {}
        self._closure: Any = ()

    @property
    def names(self) -> dict[str, Any]:
        """What the names in expressions mean; `cells` is the closure of the step."""
        return self._names.meanings

    def cell(self, text: str) -> Any:
        """The cell whose contents an expression finds, if it is one of a cell."""
        if not text.endswith(CONTENTS):
            return None
        return eval(text.removesuffix(CONTENTS), {**self.names, "cells": self._closure})

    def globals(self, text: str) -> Any:
        """The dict of globals that an expression starts at."""
        return self.names.get(text.partition("[")[0], {})

    # Roots --------------------------------------------------------------------------------------

    def step(self, fn: Any, values: Sequence[Any]) -> None:
        """Follows a step, given the values of a call in the order of its parameters."""
        given = [self._argument(str(index), value) for index, value in enumerate(values)]
        while isinstance(fn, functools.partial):
            owner = self._names.object(fn, "partial")
            if owner is not None:
                self._partial(owner)
            fn = fn.func
        if isinstance(fn, types.MethodType):
            self._method(self._names.object(fn.__self__, "`self`"), fn.__func__, given, {})
        elif isinstance(fn, types.FunctionType):
            self._closure = fn.__closure__ or ()
            cells = cells_of(fn, "cells")
            known = bound(fn, "", given, {})
            self._code(fn.__code__, Frame(fn.__globals__, cells, known))
        else:
            self.object(fn)

    def _argument(self, name: str, value: Any) -> Place | None:
        """An object among the arguments, or those of `*args`."""
        if isinstance(value, tuple):
            given = [self._argument(f"{name}[{i}]", each) for i, each in enumerate(value)]
            return Place("", "", Spread(given))
        found: Place | None
        if isinstance(value, Given):
            found = None if is_data(value.value) else Place(f"`{name}`", "", value.value)
        elif is_data(value) or structure(value) is not None:  # values of the call, not around it
            return None
        else:
            found = self._names.object(value, f"`{name}`")
        if found is not None:
            self._used(found)
        return found

    def object(self, value: Any) -> None:
        """Follows an object that a step uses."""
        if isinstance(value, types.MethodType):
            self._method(self._names.object(value.__self__, "`self`"), value.__func__, [], {})
            return
        found = None if is_data(value) else self._names.object(value, type(value).__name__)
        if found is not None:
            self._used(found)

    # Values -------------------------------------------------------------------------------------

    def _mentioned(self, place: Place) -> None:
        """Notes a value that a step reads, and follows it if it is code of the user's."""
        value = place.value
        if is_module(value) or place.text.count("[") > _DEEP:
            return
        new = place.text not in self.places
        self._note(place)
        self._passing(place)
        if isinstance(value, types.MethodType):
            owner = self._names.object(value.__self__, "`self`")
            self._method(owner, value.__func__, [], {})
            if owner is not None and is_flax(owner.value):  # `state.apply_fn`
                self._used(owner)
        elif isinstance(value, (list, tuple, dict)) and new and place.text:
            for key, each in items(value):
                if callable(each) or isinstance(each, CONTAINERS):
                    self._carefully(self._mentioned, self._names.item(place, key, each))
        elif new:
            self._used(place)

    def _note(self, place: Place) -> None:
        if place.text:
            self.places.setdefault(place.text, place)

    def _passing(self, place: Place) -> None:
        changes = isinstance(place.value, (*CONTAINERS, np.ndarray)) or is_generator(place.value)
        if changes and place.text:
            self.containers.setdefault(id(place.value), place)

    def _used(self, place: Place) -> None:
        """Follows an object that may be called."""
        value = place.value
        kind = type(value)
        wrapped = None if kind is type else getattr(value, "__wrapped__", None)
        if isinstance(value, types.FunctionType) and is_users_function(value):
            self._function(place, [], {})
        elif isinstance(value, functools.partial):
            self._partial(place)
        elif isinstance(wrapped, types.FunctionType):  # a compiled or decorated function
            self._function(further(place, ".__wrapped__", wrapped), [], {})
        elif is_keras(value):
            self._keras(value)
        elif is_flax(value):
            self._flax(place)
        elif hasattr(kind, "_captured_objects"):
            for part in value._captured_objects():
                self.object(part)
        elif not isinstance(value, type):
            call = member(value, "__call__")
            if isinstance(call, types.FunctionType):
                self._method(place, call, [], {})

    def _partial(self, place: Place) -> None:
        """Follows a function with some of its arguments given."""
        made: functools.partial[Any] = place.value
        args = [further(place, f".args[{i}]", value) for i, value in enumerate(made.args)]
        named = {n: further(place, f".keywords[{n!r}]", v) for n, v in made.keywords.items()}
        for each in (*args, *named.values()):
            self._mentioned(each)
        func = further(place, ".func", made.func)
        if isinstance(made.func, types.MethodType):
            owner = self._names.object(made.func.__self__, "`self`")
            self._method(owner, made.func.__func__, args, named)
        elif is_users_function(made.func):
            self._function(func, args, named)
        else:
            self._used(func)

    def _keras(self, value: Any) -> None:
        """Follows what Keras runs of a model, and what it reads of it."""
        for each in parts(value):
            name = getattr(each, "name", "")
            owner = self._names.object(each, f"{type(each).__name__} {name!r}")
            if owner is None or id(each) in self._known:
                continue
            self._known.add(id(each))
            for method in called_by_keras(each):
                self._method(owner, method, [], {})
            for name, setting, follows in settings(each):
                place = self._names.attribute(owner, name, setting)
                if follows:
                    self._used(place)
                else:
                    owned = Place(place.label, place.text, setting, owned=True)
                    self.places.setdefault(place.text, owned)

    def _flax(self, place: Place) -> None:
        """Follows what Flax runs of a module, or of one that the step makes of a class."""
        for each in modules(place.value):
            owner = place if each is place.value else Place("`self`", "", each)
            for method in called_by_flax(each):
                self._method(None if isinstance(each, type) else owner, method, [], {})


def reached(fn: Any, values: Sequence[Any], uses: Callable[[], Sequence[Any]]) -> Reach:
    """What a step reaches in Python, as far as it can be followed.

    Args:
        fn: The step.
        values: The arguments of a call, in the order of its parameters.
        uses: Objects that it uses and that its code does not tell.
    """
    found = Reach()
    try:
        found.step(fn, values)
        for each in uses():
            found.object(each)
    except Exception as error:  # a step that cannot be read can still be trained
        found.missed.append(f"{type(error).__name__}: {error}")
    return found


def taken(before: Reach, after: Reach) -> Captures:
    """The values that a step took from around it, and did not change itself."""
    earlier = {place.text: place.value for place in before.places.values()}
    written = {write.place.text for write in after.writes}
    owners = [write.owner.value for write in after.writes if write.owner is not None]
    changed = {id(owner) for owner in owners if not isinstance(owner, SCALARS)}
    steady = [
        place
        for place in after.places.values()
        if place.text not in written
        and id(place.value) not in changed
        and _is_still(place.value, earlier.get(place.text, place.value))
    ]
    return Captures(steady, after.names)


def _is_still(value: Any, before: Any) -> bool:
    return value is before or (isinstance(value, types.MethodType) and value == before)
