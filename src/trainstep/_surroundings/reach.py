"""Finds the values around a step that its code can reach.

    function --its bytecode--> paths --resolved now--> places: a value, an expression that finds it
                                                       again at each call, a label, a line

Only the user's own code is analyzed, not that of libraries: the step, the functions and methods
that it names, and those of the layers, losses, metrics and optimizers that it calls. The
expressions start at a dict of globals, at the step's closure, or at a weak reference: none of them
keeps an object alive.

    reached         --> all values in reach of a step; computed before and after a trace
    captured_values --> the captured values among them: read and not changed by the step
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trainstep._common.structure import structure
from trainstep._surroundings.captures import Captures
from trainstep._surroundings.code_model import (
    CONTENTS,
    Frame,
    StarArguments,
    bind_arguments,
    closure_places,
)
from trainstep._surroundings.flax_objects import called_by_flax, is_flax, modules
from trainstep._surroundings.keras_objects import called_by_keras, is_keras, layers_of, settings
from trainstep._surroundings.places import Given, Place, extend
from trainstep._surroundings.value_kinds import (
    CONTAINERS,
    SCALARS,
    class_attribute,
    few_items,
    is_data,
    is_generator,
    is_module,
    is_users_function,
)
from trainstep._surroundings.walk_code import CodeWalker

_MAX_DEPTH = 8  # of nested containers


class Reach(CodeWalker):
    """The values in reach of a step.

    Attributes:
        places: The values that are read, by the expression that finds each.
        containers: The containers, arrays and generators on the way, by id.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, Place] = {}
        self.containers: dict[int, Place] = {}
        self._closure: Any = ()

    @property
    def names(self) -> dict[str, Any]:
        """The object behind each name in the expressions, but for `cells`, the step's closure."""
        return self._expressions.names

    def cell(self, text: str) -> Any:
        """The cell that an expression reads; None if it reads none."""
        if not text.endswith(CONTENTS):
            return None
        return eval(text.removesuffix(CONTENTS), {**self.names, "cells": self._closure})

    def globals(self, text: str) -> Any:
        """The dict of globals at which an expression starts."""
        return self.names.get(text.partition("[")[0], {})

    # Roots --------------------------------------------------------------------------------------

    def step(self, fn: Any, values: Sequence[Any]) -> None:
        """Analyzes a step, given the arguments of a call in the order of its parameters."""
        given = [self._argument(str(index), value) for index, value in enumerate(values)]
        while isinstance(fn, functools.partial):
            owner = self._expressions.object(fn, "partial")
            if owner is not None:
                self._follow_partial(owner)
            fn = fn.func
        if isinstance(fn, types.MethodType):
            self._method(self._expressions.object(fn.__self__, "`self`"), fn.__func__, given, {})
        elif isinstance(fn, types.FunctionType):
            self._closure = fn.__closure__ or ()
            cells = closure_places(fn, "cells")
            known = bind_arguments(fn, "", given, {})
            self._code(fn.__code__, Frame(fn.__globals__, cells, known))
        else:
            self.object(fn)

    def _argument(self, name: str, value: Any) -> Place | None:
        """The place of an object among the arguments, or of those in `*args`."""
        if isinstance(value, tuple):
            given = [self._argument(f"{name}[{i}]", each) for i, each in enumerate(value)]
            return Place("", "", StarArguments(given))
        found: Place | None
        if isinstance(value, Given):
            found = None if is_data(value.value) else Place(f"`{name}`", "", value.value)
        elif is_data(value) or structure(value) is not None:  # an input of the step
            return None
        else:
            found = self._expressions.object(value, f"`{name}`")
        if found is not None:
            self._follow_object(found)
        return found

    def object(self, value: Any) -> None:
        """Analyzes an object that a step uses."""
        if isinstance(value, types.MethodType):
            self._method(self._expressions.object(value.__self__, "`self`"), value.__func__, [], {})
            return
        found = None if is_data(value) else self._expressions.object(value, type(value).__name__)
        if found is not None:
            self._follow_object(found)

    # Values -------------------------------------------------------------------------------------

    def _on_read(self, place: Place) -> None:
        """Records a value that a step reads, and analyzes it if it is the user's code."""
        value = place.value
        if is_module(value) or place.text.count("[") > _MAX_DEPTH:
            return
        new = place.text not in self.places
        self._record(place)
        self._on_passed(place)
        if isinstance(value, types.MethodType):
            owner = self._expressions.object(value.__self__, "`self`")
            self._method(owner, value.__func__, [], {})
            if owner is not None and is_flax(owner.value):  # `state.apply_fn`
                self._follow_object(owner)
        elif isinstance(value, (list, tuple, dict)) and new and place.text:
            for key, each in few_items(value):
                if callable(each) or isinstance(each, CONTAINERS):
                    self._guarded(self._on_read, self._expressions.item(place, key, each))
        elif new:
            self._follow_object(place)

    def _record(self, place: Place) -> None:
        if place.text:
            self.places.setdefault(place.text, place)

    def _on_passed(self, place: Place) -> None:
        changes = isinstance(place.value, (*CONTAINERS, np.ndarray)) or is_generator(place.value)
        if changes and place.text:
            self.containers.setdefault(id(place.value), place)

    def _follow_object(self, place: Place) -> None:
        """Analyzes an object that the step may call."""
        value = place.value
        kind = type(value)
        wrapped = None if kind is type else getattr(value, "__wrapped__", None)
        if isinstance(value, types.FunctionType) and is_users_function(value):
            self._function(place, [], {})
        elif isinstance(value, functools.partial):
            self._follow_partial(place)
        elif isinstance(wrapped, types.FunctionType):  # a compiled or decorated function
            self._function(extend(place, ".__wrapped__", wrapped), [], {})
        elif is_keras(value):
            self._follow_keras(value)
        elif is_flax(value):
            self._follow_flax(place)
        elif hasattr(kind, "_captured_objects"):
            for part in value._captured_objects():
                self.object(part)
        elif not isinstance(value, type):
            call = class_attribute(value, "__call__")
            if isinstance(call, types.FunctionType):
                self._method(place, call, [], {})

    def _follow_partial(self, place: Place) -> None:
        """Analyzes a `functools.partial`."""
        made: functools.partial[Any] = place.value
        args = [extend(place, f".args[{i}]", value) for i, value in enumerate(made.args)]
        named = {n: extend(place, f".keywords[{n!r}]", v) for n, v in made.keywords.items()}
        for each in (*args, *named.values()):
            self._on_read(each)
        func = extend(place, ".func", made.func)
        if isinstance(made.func, types.MethodType):
            owner = self._expressions.object(made.func.__self__, "`self`")
            self._method(owner, made.func.__func__, args, named)
        elif is_users_function(made.func):
            self._function(func, args, named)
        else:
            self._follow_object(func)

    def _follow_keras(self, value: Any) -> None:
        """Analyzes the methods that Keras runs of an object, and the settings that it reads."""
        for each in layers_of(value):
            name = getattr(each, "name", "")
            owner = self._expressions.object(each, f"{type(each).__name__} {name!r}")
            if owner is None or id(each) in self._known:
                continue
            self._known.add(id(each))
            for method in called_by_keras(each):
                self._method(owner, method, [], {})
            for name, setting, follows in settings(each):
                place = self._expressions.attribute(owner, name, setting)
                if follows:
                    self._follow_object(place)
                else:
                    owned = Place(place.label, place.text, setting, owned=True)
                    self.places.setdefault(place.text, owned)

    def _follow_flax(self, place: Place) -> None:
        """Analyzes the methods that Flax runs of a module, or of a module class."""
        for each in modules(place.value):
            owner = place if each is place.value else Place("`self`", "", each)
            for method in called_by_flax(each):
                self._method(None if isinstance(each, type) else owner, method, [], {})


def reached(fn: Any, values: Sequence[Any], uses: Callable[[], Sequence[Any]]) -> Reach:
    """Finds the values in reach of a step, as far as its code can be analyzed.

    Args:
        fn: The step.
        values: The arguments of a call, in the order of its parameters.
        uses: Returns further objects that the step uses, which its code does not name.
    """
    found = Reach()
    try:
        found.step(fn, values)
        for each in uses():
            found.object(each)
    except Exception as error:  # a step that cannot be analyzed can still be compiled
        found.missed.append(f"{type(error).__name__}: {error}")
    return found


def captured_values(before: Reach, after: Reach) -> Captures:
    """The captured values of a step: those that it reads and does not change."""
    earlier = {place.text: place.value for place in before.places.values()}
    written = {write.place.text for write in after.writes}
    owners = [write.owner.value for write in after.writes if write.owner is not None]
    changed = {id(owner) for owner in owners if not isinstance(owner, SCALARS)}
    steady = [
        place
        for place in after.places.values()
        if place.text not in written
        and id(place.value) not in changed
        and _is_unchanged(place.value, earlier.get(place.text, place.value))
    ]
    return Captures(steady, after.names)


def _is_unchanged(value: Any, before: Any) -> bool:
    return value is before or (isinstance(value, types.MethodType) and value == before)
