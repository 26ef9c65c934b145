"""What a piece of code reads, changes and calls, and what the functions do that it calls.

Only the user's own code is read, not that of libraries.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Mapping, Sequence
from typing import Any

from trainstep._common import user_code
from trainstep._surroundings.bytecode import scan
from trainstep._surroundings.code_model import (
    Call,
    Constant,
    Frame,
    Made,
    Path,
    Scan,
    Spread,
    Value,
    bound,
    cells_of,
)
from trainstep._surroundings.follow_path import Paths
from trainstep._surroundings.places import Place, Write, at, further
from trainstep._surroundings.value_kinds import (
    CHANGES,
    CONTAINERS,
    is_callback,
    is_data,
    is_users_function,
)

log = logging.getLogger("trainstep")
_LIMIT = 2000  # pieces of code


class Walk(Paths):
    """Goes through code. Abstract: the values that it comes to are told to whoever inherits.

    Attributes:
        writes: What is changed.
        modules: Dicts of globals of the user's code.
        missed: Code that could not be followed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[Write] = []
        self.modules: dict[int, Any] = {}
        self.missed: list[str] = []
        self._known: set[Any] = set()
        self._count = 0

    def _mentioned(self, place: Place) -> None:
        """Told of a value that code reads."""
        raise NotImplementedError

    def _note(self, place: Place) -> None:
        """Told of a value that a program depends on, but whose parts count for nothing."""
        raise NotImplementedError

    def _function(
        self, place: Place, args: Sequence[Place | None], named: Mapping[str, Place | None]
    ) -> None:
        """Goes through a function, given what is known of its arguments."""
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
        """Goes through a method, if it is the user's."""
        if not isinstance(fn, types.FunctionType) or not user_code.is_users_file(fn.__code__):
            return
        cells = cells_of(fn, self._names.closure(fn)) if fn.__closure__ else {}
        known = bound(fn, "", [owner, *args], named)
        self._code(fn.__code__, Frame(fn.__globals__, cells, known))

    def _ran(self, owner: Place, fn: Any) -> None:
        self._method(owner, fn, [], {})

    def _code(self, code: types.CodeType, frame: Frame) -> None:
        """Goes through a piece of code, once for all that its names may lead to."""
        known = [*frame.cells.items(), *frame.locals.items()]
        key = (code, id(frame.globals), tuple(sorted((n, _same(p)) for n, p in known)))
        if key in self._known or not user_code.is_users_file(code):
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

    # What it reads and changes ------------------------------------------------------------------

    def _read(self, path: Value, frame: Frame, code: Any, line: int) -> None:
        for each in self._expanded(path, frame, code) if isinstance(path, Path) else ():
            place = self._follow(each, frame, code, line)
            if place is None:
                continue
            # The container is watched as a whole: data in it need not be watched once more.
            if each == path or not place.text.endswith("]") or not is_data(place.value):
                self._mentioned(place)

    def _passed(self, path: Value, frame: Frame, code: types.CodeType, line: int) -> Place | None:
        return self._follow(path, frame, code, line) if isinstance(path, Path) else None

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

    # What it calls ------------------------------------------------------------------------------

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
