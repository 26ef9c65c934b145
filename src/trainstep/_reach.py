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
import logging
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainstep import _site
from trainstep._bytecode import Call, Constant, Made, Path, Scan, Value, scan
from trainstep._flax_parts import called_by_flax, is_flax, modules
from trainstep._following import Paths
from trainstep._frames import CONTENTS, Frame, Spread, bound, cells_of
from trainstep._keras_parts import called_by_keras, is_keras, parts, settings
from trainstep._places import (
    CHANGES,
    CONTAINERS,
    Given,
    Place,
    Write,
    at,
    further,
    is_callback,
    is_data,
    is_generator,
    is_module,
    is_users_function,
    items,
    member,
)
from trainstep._structure import structure

log = logging.getLogger("trainstep")
_LIMIT = 2000  # pieces of code
_DEEP = 8  # containers in containers


class Reach(Paths):
    """What was found.

    Attributes:
        places: What is read, by the expression that finds it.
        writes: What is changed.
        containers: Lists and the like that are mentioned.
        modules: Dicts of globals of the user's code.
        missed: Code that could not be followed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, Place] = {}
        self.writes: list[Write] = []
        self.containers: dict[int, Place] = {}
        self.modules: dict[int, Any] = {}
        self.missed: list[str] = []
        self._known: set[Any] = set()
        self._count = 0
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

    # Roots ----------------------------------------------------------------------------------

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

    # Code -----------------------------------------------------------------------------------

    def _code(self, code: types.CodeType, frame: Frame) -> None:
        known = [*frame.cells.items(), *frame.locals.items()]
        key = (code, id(frame.globals), tuple(sorted((n, _same(p)) for n, p in known)))
        if key in self._known or not _site.is_users_file(code):
            return
        if self._count > _LIMIT:
            self.missed.append(f"more than {_LIMIT} functions")
            return
        self._known.add(key)
        self._count += 1
        self.modules[id(frame.globals)] = frame.globals
        found = scan(code)
        for path, line in found.reads.items():
            self._carefully(self._read, path, frame, code, line)
        for path, line in found.writes.items():
            self._carefully(self._written, path, frame, code, line)
        for call in found.calls:
            for each in self._expanded(call.path, frame, code):
                one = Call(each, call.args, call.keywords, call.line, call.starred)
                self._carefully(self._called, one, frame, code)
        on_the_host = self._on_the_host(found, frame, code)
        for inner in found.inner:
            if inner not in on_the_host:
                self._code(inner, self._inside(inner, code, found, frame))

    def _carefully(self, follow: Any, *args: Any) -> None:
        """Follows one thing; whatever the user's objects do when looked at, the rest goes on."""
        try:
            follow(*args)
        except Exception as error:
            self.missed.append(f"{type(error).__name__}: {error}")
            log.debug("something around a step could not be followed", exc_info=True)

    def _on_the_host(self, found: Scan, frame: Frame, code: types.CodeType) -> set[Any]:
        """The functions that are made here for `callback`: they run at every step."""
        made = [(call, call.args[0]) for call in found.calls if call.args]
        return {
            first.code
            for call, first in made
            if isinstance(first, Made)
            and (place := self._follow(call.path, frame, code, call.line)) is not None
            and is_callback(place.value)
        }

    def _read(self, path: Value, frame: Frame, code: Any, line: int) -> None:
        for each in self._expanded(path, frame, code) if isinstance(path, Path) else ():
            place = self._follow(each, frame, code, line)
            if place is None:
                continue
            # The container is watched as a whole: data in it need not be watched once more.
            if each == path or not place.text.endswith("]") or not is_data(place.value):
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
        given: dict[str, Place] = {}
        for made, args in found.local_calls:
            if made is inner:
                for name, value in zip(inner.co_varnames, args, strict=False):
                    place = self._passed(value, frame, code, code.co_firstlineno)
                    if place is not None:
                        given[name] = place
        return Frame(frame.globals, cells, given)

    # Values ---------------------------------------------------------------------------------

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

    def _called(self, call: Call, frame: Frame, code: types.CodeType) -> None:
        if call.path.scope == "super":
            self._called_super(call, frame, code)
            return
        if call.path.steps and self._called_on_data(call, frame, code):
            return
        place = self._follow(call.path, frame, code, call.line)
        given = [*call.args, *call.keywords.values()]
        if place is not None and is_callback(place.value):
            # It calls the same function at every step, whatever that reads.
            kept = self._passed(given.pop(0), frame, code, call.line) if given else None
            if kept is not None and not is_data(kept.value):  # but not the list of `seen.append`
                self._note(kept)
        place = None if place is None else _unwrapped(place)
        if place is None or not is_users_function(place.value):
            for path in (call.path, *given):
                self._read(path, frame, code, call.line)
            return
        args, named = self._given(call, frame, code)
        self._note(place)
        called: Any = place.value
        if isinstance(called, types.FunctionType):
            self._function(place, args, named)
            return
        owner = self._names.object(called.__self__, "`self`")
        if call.path.steps and not isinstance(called.__self__, type):
            owner = self._follow(call.path._replace(steps=call.path.steps[:-1]), frame, code, 0)
        self._method(owner, called.__func__, args, named)

    def _given(
        self, call: Call, frame: Frame, code: types.CodeType
    ) -> tuple[list[Place | None], dict[str, Place | None]]:
        """What a call passes on, as far as it is known."""
        args = [self._passed(a, frame, code, call.line) for a in call.args]
        starred = self._passed(call.starred, frame, code, call.line)
        if starred is not None and isinstance(starred.value, Spread):
            args += starred.value
        named = {n: self._passed(a, frame, code, call.line) for n, a in call.keywords.items()}
        return args, named

    def _called_super(self, call: Call, frame: Frame, code: types.CodeType) -> None:
        """`super().call(x)`: the next class that has it."""
        here = frame.cells.get("__class__")
        owner = frame.locals.get(code.co_varnames[0]) if code.co_varnames else None
        if here is None or owner is None or not call.path.steps:
            return
        kinds = type(owner.value).__mro__
        name = call.path.steps[0][1]
        later = kinds[kinds.index(here.value) + 1 :] if here.value in kinds else ()
        found = next((vars(kind)[name] for kind in later if name in vars(kind)), None)
        args, named = self._given(call, frame, code)
        self._method(owner, found, args, named)

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
        if name in CHANGES and owner.text:
            self._passing(owner)
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
        text = f"{place.text}.__closure__" if place.text else self._names.closure(fn)
        cells = cells_of(fn, text)
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
        cells = cells_of(fn, self._names.closure(fn)) if fn.__closure__ else {}
        known = bound(fn, "", [owner, *args], named)
        self._code(fn.__code__, Frame(fn.__globals__, cells, known))

    # Changes --------------------------------------------------------------------------------

    def _written(self, path: Path, frame: Frame, code: types.CodeType, line: int) -> None:
        if not path.steps:
            place = self._follow(path, frame, code, line)
            if place is None and path.scope == "global":  # a name that the step makes
                place = at(self._names.globals(frame.globals, path.name, None), code, line)
            if place is not None:
                self.writes.append(Write(None, ("name", path.name), place))
            return
        owner = self._follow(path.before(), frame, code, line)
        if owner is not None and owner.text:
            self._passing(owner)
            kind, key = path.steps[-1]
            place = self._names.attribute(owner, key, None) if kind == "attr" else None
            if place is None:
                place = further(owner, "[...]" if key is None else f"[{key!r}]", None)
            self.writes.append(Write(owner, (kind, key), at(place, code, line)))

    def _ran(self, owner: Place, fn: Any) -> None:
        self._method(owner, fn, [], {})

    def _passing(self, place: Place) -> None:
        changes = isinstance(place.value, (*CONTAINERS, np.ndarray)) or is_generator(place.value)
        if changes and place.text:
            self.containers.setdefault(id(place.value), place)


def _same(place: Place) -> str:
    """What tells a place from another; values that are made at each look tell nothing."""
    made = isinstance(place.value, (Spread, types.MethodType))
    return place.text or ("" if made else f"#{id(place.value)}")


def _unwrapped(place: Place) -> Place:
    """A function of the user's behind a decorator of a library's, such as `contextmanager`."""
    value = place.value
    while isinstance(value, types.FunctionType) and not is_users_function(value):
        inner = getattr(value, "__wrapped__", None)
        if not isinstance(inner, types.FunctionType):
            break
        place, value = further(place, ".__wrapped__", inner, ""), inner
    return place
