"""What a step reaches in Python around it: from names in its code to values, and the way there.

    function --its bytecode--> paths --followed now--> places: a value, an expression that finds it
                                                       again at each call, a name, a line

Only the user's own code is read, not that of libraries: the step, the functions and methods that
it mentions, and those of layers, losses, metrics and optimizers that it calls. Places are found by
expressions that start at a dict of globals, at the step's closure, or at a weak reference: none of
them keeps an object alive.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import KerasVariable

from trainstep import _site
from trainstep._arguments import structure
from trainstep._bytecode import Call, Constant, Made, Path, Scan, Value, scan
from trainstep._frames import CONTENTS, Frame, Spread, bound, cells_of
from trainstep._places import (
    CHANGES,
    CONTAINERS,
    Place,
    Write,
    at,
    further,
    is_data,
    is_generator,
    is_library,
    is_plain_member,
    is_users_function,
    item,
    items,
    leads_on,
)

_KERAS = (
    keras.layers.Layer,
    keras.losses.Loss,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
)
# Which methods of a class of the user's Keras runs in a step.
_METHODS = ("call", "__call__", "update_state", "result", "update_step", "compute_loss")
GONE: Any = object()  # what is found where there is nothing
_LIMIT = 400  # pieces of code


@dataclass
class Reach:
    """What was found.

    Attributes:
        places: What is read, by the expression that finds it.
        writes: What is changed.
        containers: Lists and the like that are mentioned.
        modules: Dicts of globals of the user's code.
        names: What the names in expressions mean; `cells` is the closure of the step.
    """

    places: dict[str, Place] = field(default_factory=dict)
    writes: list[Write] = field(default_factory=list)
    containers: dict[int, Place] = field(default_factory=dict)
    modules: dict[int, Any] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._known: set[Any] = set()
        self._closure: Any = ()
        self._objects: dict[int, str] = {}

    def cell(self, text: str) -> Any:
        """The cell whose contents an expression finds, if it is one of a cell."""
        if not text.endswith(CONTENTS):
            return None
        return eval(text.removesuffix(CONTENTS), {**self.names, "cells": self._closure})

    def globals(self, text: str) -> Any:
        """The dict of globals that an expression starts at."""
        return self.names.get(text.partition("[")[0], {})

    # Roots ----------------------------------------------------------------------------------

    def step(self, fn: Any, values: Sequence[Any]) -> None:
        """Follows a step, given the values of a call in the order of its parameters."""
        given = [self._argument(str(index), value) for index, value in enumerate(values)]
        while isinstance(fn, functools.partial):
            owner = self._object(fn, "partial")
            if owner is not None:
                self._partial(owner)
            fn = fn.func
        if isinstance(fn, types.MethodType):
            self._method(self._object(fn.__self__, "`self`"), fn.__func__, given, {})
        elif isinstance(fn, types.FunctionType):
            self._closure = fn.__closure__ or ()
            cells = cells_of(fn, "cells")
            known = bound(fn, "", given, {})
            self._code(fn.__code__, Frame(fn.__globals__, cells, known))
        else:
            self.object(fn)

    def _argument(self, name: str, value: Any) -> Place | None:
        """An object among the arguments, or those of `*args`, by weak reference."""
        if isinstance(value, tuple):
            given = [self._argument(f"{name}[{i}]", each) for i, each in enumerate(value)]
            return Place("", "", Spread(given))
        if is_data(value) or structure(value) is not None:  # values of the call, not around it
            return None
        found = self._object(value, f"`{name}`")
        if found is not None:
            self._used(found)
        return found

    def object(self, value: Any) -> None:
        """Follows an object that a step uses."""
        found = self._object(value, type(value).__name__)
        if found is not None:
            self._used(found)

    def _object(self, value: Any, label: str) -> Place | None:
        """An object by weak reference."""
        if isinstance(value, (types.ModuleType, type, KerasVariable)):
            return None
        if id(value) not in self._objects:
            try:
                ref = weakref.ref(value)
            except TypeError:
                return None
            name = self._objects[id(value)] = f"cap_r{len(self.names)}"
            self.names[name] = ref
        return Place(label, f"{self._objects[id(value)]}()", value)

    # Code -----------------------------------------------------------------------------------

    def _code(self, code: types.CodeType, frame: Frame) -> None:
        known = [*frame.cells.items(), *frame.locals.items()]
        key = (code, id(frame.globals), tuple(sorted((n, p.text) for n, p in known)))
        if key in self._known or len(self._known) > _LIMIT or not _site.is_users_file(code):
            return
        self._known.add(key)
        self.modules[id(frame.globals)] = frame.globals
        found = scan(code)
        for path, line in found.reads.items():
            self._read(path, frame, code, line)
        for path, line in found.writes.items():
            self._written(path, frame, code, line)
        for call in found.calls:
            self._called(call, frame, code)
        on_the_host = self._on_the_host(found, frame, code)
        for inner in found.inner:
            if inner not in on_the_host:
                self._code(inner, self._inside(inner, code, found, frame))

    def _on_the_host(self, found: Scan, frame: Frame, code: types.CodeType) -> set[Any]:
        """The functions that are made here for `callback`: they run at every step."""
        made = [(call, call.args[0]) for call in found.calls if call.args]
        return {
            first.code
            for call, first in made
            if isinstance(first, Made)
            and (place := self._follow(call.path, frame, code, call.line)) is not None
            and _is_callback(place.value)
        }

    def _read(self, path: Value, frame: Frame, code: Any, line: int) -> None:
        place = self._follow(path, frame, code, line) if isinstance(path, Path) else None
        if place is not None:
            self._mentioned(place)

    def _inside(
        self, inner: types.CodeType, code: types.CodeType, found: Scan, frame: Frame
    ) -> Frame:
        """What names mean in a function inside another."""
        cells = {}
        for name in inner.co_freevars:
            if name in code.co_freevars:
                place = frame.cells.get(name)
            elif name in found.aliases:
                place = self._passed(found.aliases[name], frame, code, code.co_firstlineno)
            else:
                place = frame.locals.get(name)
            if place is not None:
                cells[name] = place
        return Frame(frame.globals, cells, {})

    def _follow(self, path: Path, frame: Frame, code: types.CodeType, line: int) -> Place | None:
        """Where a path leads, or None if it leads into a library or to something unknown."""
        place: Place | None
        if path.scope == "global":
            if path.name not in frame.globals:
                return None
            name = self._globals(frame.globals)
            value = frame.globals[path.name]
            place = Place(f"global `{path.name}`", f"{name}[{path.name!r}]", value)
        else:
            place = (frame.cells if path.scope == "free" else frame.locals).get(path.name)
        for kind, key in path.steps:
            if place is None:
                return None
            self._note_container(at(place, code, line))
            if is_data(place.value) and not leads_on(place.value, kind, key):
                break  # `table.shape`, `weights[i]`: the whole of it counts
            place = self._attribute(place, key) if kind == "attr" else item(place, key)
        return None if place is None else at(place, code, line)

    def _globals(self, found: Mapping[str, Any]) -> str:
        if id(found) not in self._objects:
            name = self._objects[id(found)] = f"cap_g{len(self.names)}"
            self.names[name] = found
        return self._objects[id(found)]

    def _attribute(self, place: Place, name: str) -> Place | None:
        value = place.value
        if isinstance(value, types.ModuleType):
            found = vars(value).get(name, GONE)
            known = _site.is_users_module(value) or _is_callback(found)
            return further(place, f".{name}", found) if known and found is not GONE else None
        own = getattr(type(value), name, None)
        if isinstance(own, property) and own.fget is not None and not isinstance(value, type):
            self._method(place, own.fget, [], {})
            return None
        if name not in getattr(value, "__dict__", ()):
            wrapped = getattr(own, "__wrapped__", None)
            if hasattr(own, "warm_up") and isinstance(wrapped, types.FunctionType):
                self._method(place, wrapped, [], {})  # a compiled step that is a method
                return None
            if isinstance(own, types.FunctionType):
                # A method of a library's class reads what it likes of its object.
                method = types.MethodType(own, value)
                users = is_users_function(method)
                return further(place, f".{name}", method) if users else place
        if name in getattr(value, "__dict__", ()) or is_plain_member(value, name):
            with_dot = further(place, f".{name}", getattr(value, name, None))
            return with_dot if hasattr(value, name) else None
        return None

    # Values ---------------------------------------------------------------------------------

    def _mentioned(self, place: Place) -> None:
        """Notes a value that a step reads, and follows it if it is code of the user's."""
        value = place.value
        if isinstance(value, types.MethodType):
            if place.text and is_users_function(value):
                self.places.setdefault(place.text, place)
            self._method(self._object(value.__self__, "`self`"), value.__func__, [], {})
            return
        if is_library(value) or not place.text:
            return
        new = place.text not in self.places
        self.places.setdefault(place.text, place)
        self._note_container(place)
        if isinstance(value, (list, tuple, dict)) and new:
            for key, each in items(value):
                if callable(each) or isinstance(each, CONTAINERS):
                    self._mentioned(further(place, f"[{key!r}]", each))
        elif new:
            self._used(place)

    def _used(self, place: Place) -> None:
        """Follows an object that may be called."""
        value = place.value
        wrapped = getattr(value, "__wrapped__", None)
        if isinstance(value, types.FunctionType):
            self._function(place, [], {})
        elif isinstance(value, functools.partial):
            self._partial(place)
        elif isinstance(wrapped, types.FunctionType):  # a compiled or decorated function
            self._function(further(place, ".__wrapped__", wrapped), [], {})
        elif isinstance(value, _KERAS):
            self._keras(value)
        elif hasattr(value, "_captured_objects"):
            for part in value._captured_objects():
                self.object(part)
        elif not isinstance(value, type):
            call = getattr(type(value), "__call__", None)  # noqa: B004
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
            owner = self._object(made.func.__self__, "`self`")
            self._method(owner, made.func.__func__, args, named)
        elif isinstance(made.func, types.FunctionType):
            self._function(func, args, named)
        else:
            self._used(func)

    def _keras(self, value: Any) -> None:
        """Follows what Keras runs of a model, and what it reads of it."""
        layers = value._flatten_layers() if isinstance(value, keras.layers.Layer) else [value]
        for each in layers:
            owner = self._object(each, f"{type(each).__name__} {getattr(each, 'name', '')!r}")
            if owner is None or ("keras", id(each)) in self._known:
                continue
            self._known.add(("keras", id(each)))
            for method in _METHODS:
                own = getattr(type(each), method, None)
                if isinstance(own, types.FunctionType):
                    self._method(owner, own, [], {})
            for name, attribute in list(vars(each).items()):
                self._setting(owner, name, attribute)

    def _setting(self, owner: Place, name: str, value: Any) -> None:
        """Notes a number or a function that Keras reads of an object, and follows the latter."""
        place = further(owner, f".{name}", value)
        optional = value is None and isinstance(owner.value, keras.optimizers.Optimizer)
        if isinstance(value, types.FunctionType):
            self._function(place, [], {})
        # Not what hangs on a model: it may have been compiled with another optimizer.
        parts = (keras.optimizers.schedules.LearningRateSchedule, keras.optimizers.Optimizer)
        if isinstance(value, parts) and not isinstance(owner.value, keras.layers.Layer):
            self._keras(value)
        # Keras wraps some methods of a layer, and keeps them with it under their own names.
        public = not name.startswith("_") and not hasattr(type(owner.value), name)
        if public and (isinstance(value, (float, types.FunctionType)) or optional):
            label = f"{owner.label}.{name}"
            self.places.setdefault(place.text, Place(label, place.text, value, owned=True))

    def _called(self, call: Call, frame: Frame, code: types.CodeType) -> None:
        if call.path.steps and self._called_on_data(call, frame, code):
            return
        place = self._follow(call.path, frame, code, call.line)
        given = [*call.args, *call.keywords.values()]
        called: Any = place.value if place is not None else None
        if _is_callback(called):  # it calls the same function at every step, whatever that reads
            kept = self._passed(given.pop(0), frame, code, call.line) if given else None
            if kept is not None:
                self.places.setdefault(kept.text, kept)
        if place is None or not is_users_function(called):
            for path in (call.path, *given):
                self._read(path, frame, code, call.line)
            return
        args = [self._passed(a, frame, code, call.line) for a in call.args]
        starred = self._passed(call.starred, frame, code, call.line)
        if starred is not None and isinstance(starred.value, Spread):
            args += starred.value
        named = {n: self._passed(a, frame, code, call.line) for n, a in call.keywords.items()}
        self.places.setdefault(place.text, place)
        if isinstance(called, types.FunctionType):
            self._function(place, args, named)
        else:
            owner = self._object(called.__self__, "`self`")
            if call.path.steps:
                owner = self._follow(call.path._replace(steps=call.path.steps[:-1]), frame, code, 0)
            self._method(owner, called.__func__, args, named)

    def _passed(self, path: Value, frame: Frame, code: types.CodeType, line: int) -> Place | None:
        return self._follow(path, frame, code, line) if isinstance(path, Path) else None

    def _called_on_data(self, call: Call, frame: Frame, code: types.CodeType) -> bool:
        """Whether a call is one of a container's methods: `seen.append(...)`, `cfg.get("lr")`."""
        kind, name = call.path.steps[-1]
        owner = self._follow(call.path._replace(steps=call.path.steps[:-1]), frame, code, call.line)
        if kind != "attr" or owner is None or not isinstance(owner.value, CONTAINERS):
            return False
        for path in (*call.args, *call.keywords.values()):
            self._read(path, frame, code, call.line)
        key = call.args[0] if call.args else None
        if name in CHANGES:
            self._note_container(owner)
            self.writes.append(Write(owner, ("call", name), at(owner, code, call.line)))
        elif name == "get" and isinstance(key, Constant) and isinstance(owner.value, dict):
            found = further(owner, f".get({key.value!r})", owner.value.get(key.value))
            self._mentioned(at(found, code, call.line))
        else:
            self._mentioned(owner)
        return True

    def _function(
        self, place: Place, args: Sequence[Place | None], named: Mapping[str, Place | None]
    ) -> None:
        fn = place.value
        cells = cells_of(fn, f"{place.text}.__closure__")
        known = bound(fn, place.text, args, named)
        self._code(fn.__code__, Frame(fn.__globals__, cells, known))

    def _method(
        self,
        owner: Place | None,
        fn: Any,
        args: Sequence[Place | None],
        named: Mapping[str, Place | None],
    ) -> None:
        if not isinstance(fn, types.FunctionType) or not _site.is_users_file(fn.__code__):
            return
        # A method's own closure belongs to its class, and has nothing that changes.
        self._code(fn.__code__, Frame(fn.__globals__, {}, bound(fn, "", [owner, *args], named)))

    # Changes --------------------------------------------------------------------------------

    def _written(self, path: Path, frame: Frame, code: types.CodeType, line: int) -> None:
        if not path.steps:
            place = self._follow(path, frame, code, line)
            if place is None and path.scope == "global":  # a name that the step makes
                text = f"{self._globals(frame.globals)}[{path.name!r}]"
                place = at(Place(f"global `{path.name}`", text, None), code, line)
            if place is not None:
                self.writes.append(Write(None, ("name", path.name), place))
            return
        owner = self._follow(path._replace(steps=path.steps[:-1]), frame, code, line)
        if owner is not None:
            self._note_container(owner)
            kind, key = path.steps[-1]
            place = further(owner, f".{key}" if kind == "attr" else f"[{key!r}]", None)
            self.writes.append(Write(owner, (kind, key), at(place, code, line)))

    def _note_container(self, place: Place) -> None:
        if isinstance(place.value, (*CONTAINERS, np.ndarray)) or is_generator(place.value):
            self.containers.setdefault(id(place.value), place)


def _is_callback(value: Any) -> bool:
    return getattr(value, "__module__", "") == "trainstep._host"
