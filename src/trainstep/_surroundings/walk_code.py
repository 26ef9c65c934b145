"""Finds the values that a piece of code and its callees read, change and call.

Only the user's own code is analyzed, not that of libraries.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainstep._common import user_code
from trainstep._surroundings.bytecode import scan
from trainstep._surroundings.code_model import (
    AllNames,
    Call,
    Constant,
    Frame,
    LocalFunction,
    OneOf,
    Path,
    Scan,
    StarArguments,
    Value,
    bind_arguments,
    closure_places,
)
from trainstep._surroundings.follow_path import PathFollower
from trainstep._surroundings.places import Place, Write, extend, read_at
from trainstep._surroundings.value_kinds import (
    CONTAINERS,
    MUTATORS,
    class_attribute,
    few_items,
    is_callback,
    is_data,
    is_module,
    is_users_function,
)

log = logging.getLogger("trainstep")
_MAX_FUNCTIONS = 2000  # analyzed for one step
# Combinations of names, of code that is analyzed by its names alone.
_MAX_PATHS = 20_000


class CodeWalker(PathFollower):
    """Analyzes code and its callees. Abstract: a subclass implements `_on_read` and `_record`.

    Attributes:
        writes: The names, attributes and containers that the code changes.
        possible_writes: Those that code may change whose bytecode cannot be read.
        modules: The globals of the user's code, by id.
        missed: The errors of code that could not be analyzed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[Write] = []
        self.possible_writes: dict[str, Write] = {}
        self.modules: dict[int, Any] = {}
        self.missed: list[str] = []
        self._known: set[Any] = set()
        self._count = 0

    def _on_read(self, place: Place) -> None:
        """Called with a value that code reads."""
        raise NotImplementedError

    def _record(self, place: Place) -> None:
        """Called with a value that a program depends on, but not on its parts."""
        raise NotImplementedError

    def _function(
        self, place: Place, args: Sequence[Place | None], named: Mapping[str, Place | None]
    ) -> None:
        """Analyzes a function, given the known places of its arguments."""
        fn = place.value
        text = f"{place.text}.__closure__" if place.text else self._expressions.closure(fn)
        cells = closure_places(fn, text)
        known = bind_arguments(fn, place.text, args, named)
        self._code(fn.__code__, Frame(fn.__globals__, cells, known))

    def _method(
        self,
        owner: Place | None,
        fn: Any,
        args: Sequence[Place | None],
        named: Mapping[str, Place | None],
    ) -> None:
        """Analyzes a method, if it is the user's."""
        if not isinstance(fn, types.FunctionType) or not user_code.is_users_file(fn.__code__):
            return
        cells = closure_places(fn, self._expressions.closure(fn)) if fn.__closure__ else {}
        known = bind_arguments(fn, "", [owner, *args], named)
        self._code(fn.__code__, Frame(fn.__globals__, cells, known))

    def _on_run(self, owner: Place, fn: Any) -> None:
        self._method(owner, fn, [], {})

    def _code(self, code: types.CodeType, frame: Frame) -> None:
        """Analyzes a piece of code, once for each set of places that its names stand for."""
        known = [*frame.cells.items(), *frame.locals.items()]
        key = (code, id(frame.globals), tuple(sorted((n, _identity(p)) for n, p in known)))
        if key in self._known or not user_code.is_users_file(code):
            return
        if self._count > _MAX_FUNCTIONS:
            self.missed.append(f"more than {_MAX_FUNCTIONS} functions")
            return
        self._known.add(key)
        self._count += 1
        self.modules[id(frame.globals)] = frame.globals
        found = scan(code)
        if found.unknown:
            self._guarded(self._code_by_names, code, frame, found.unknown)
            return
        for path, line in found.reads.items():
            self._guarded(self._read, path, frame, code, line)
        for path, line in found.writes.items():
            self._guarded(self._write, path, frame, code, line)
        for call in found.calls:
            for each in self._expanded(call.path, frame, code):
                one = Call(each, call.args, call.keywords, call.line, call.starred)
                self._guarded(self._call, one, frame, code)
        host_functions = self._host_functions(found, frame, code)
        for inner in found.inner:
            if inner not in host_functions:
                for inner_frame in self._inner_frames(inner, code, found, frame):
                    self._code(inner, inner_frame)

    def _code_by_names(self, code: types.CodeType, frame: Frame, unknown: str) -> None:
        """Analyzes code whose bytecode cannot be read: it may combine all names that it has.

        Every global, variable and argument may be read and assigned, with every attribute that the
        code names, and may be passed to every function. That finds more than the code does, and
        not less.
        """
        _report_unknown(unknown)
        names = AllNames.of(code, frame)
        paths, line = list(names.roots), code.co_firstlineno
        functions: list[Path] = []
        arguments: list[Path] = []
        seen: set[int] = set()
        for path in paths:  # grows
            place = self._place_of(path, frame, code, line)
            if place is None:
                continue
            self._may_write(path, place, names, code)
            self._read(path, frame, code, line)
            value = _unwrapped(place).value
            if is_users_function(value):
                functions.append(path)
            elif not is_data(value) or isinstance(value, (list, tuple, dict)):
                arguments.append(path)
                if id(value) not in seen:
                    seen.add(id(value))
                    paths += _parts(path, value, names)
            if len(paths) > _MAX_PATHS:
                self.missed.append(f"more than {_MAX_PATHS} combinations of names")
                break
        for path in functions:
            self._call_with_any(path, arguments, names, frame, code)
        if "super" in names.attributes:
            for name in names.attributes:
                called = Path("super", "").then("attr", name)
                self._call_with_any(called, arguments, names, frame, code)

    def _may_write(self, path: Path, place: Place, names: AllNames, code: types.CodeType) -> None:
        """Records that code may assign a name, and each attribute of its value that it names."""
        if not place.text:
            return
        if not path.steps and path.scope != "local":
            self.possible_writes[place.text] = Write(None, ("name", path.name), place)
        value = place.value
        if is_data(value) or (is_module(value) and not user_code.is_users_module(value)):
            return
        for name in names.attributes:
            if isinstance(class_attribute(value, name), functools.cached_property):
                continue
            written = self._expressions.attribute(place, name, None)
            write = Write(place, ("attr", name), read_at(written, code, code.co_firstlineno))
            self.possible_writes[written.text] = write

    def _call_with_any(
        self,
        path: Path,
        arguments: Sequence[Path],
        names: AllNames,
        frame: Frame,
        code: types.CodeType,
    ) -> None:
        """Analyzes a call of a function, given each of these objects as each argument."""
        line = code.co_firstlineno
        roots = [root for root in names.roots if root.scope == "local"]
        for each in dict.fromkeys([*roots, *arguments]):
            place = self._place_of(each, frame, code, line)
            if place is not None and isinstance(place.value, StarArguments):
                call = Call(path, [], {}, line, starred=each)
            else:
                keywords: dict[str, Value] = dict.fromkeys(names.keywords, each)
                call = Call(path, [each] * code.co_stacksize, keywords, line)
            self._guarded(self._call, call, frame, code)
        if not arguments and not roots:
            self._guarded(self._call, Call(path, [], {}, line), frame, code)

    def _guarded(self, follow: Any, *args: Any) -> None:
        """Calls `follow`; an error in the user's objects must not stop the rest."""
        try:
            follow(*args)
        except Exception as error:
            self.missed.append(f"{type(error).__name__}: {error}")
            log.debug("a value that a step captures could not be analyzed", exc_info=True)

    def _host_functions(self, found: Scan, frame: Frame, code: types.CodeType) -> set[Any]:
        """The local functions passed to `callback`: they run at every step."""
        made = [(call, call.args[0]) for call in found.calls if call.args]
        return {
            first.code
            for call, first in made
            if isinstance(first, LocalFunction)
            and (place := self._follow(call.path, frame, code, call.line)) is not None
            and is_callback(place.value)
        }

    def _inner_frames(
        self, inner: types.CodeType, code: types.CodeType, found: Scan, frame: Frame
    ) -> Iterator[Frame]:
        """The frames of a function that is defined inside another, one for each of its calls."""
        line = code.co_firstlineno
        cells: dict[str, list[Place]] = {}
        inside = found.inside.get(inner, {})
        for name in inner.co_freevars:
            if name in inside:
                cells[name] = self._places_of(inside[name], frame, code, line)
            elif name in found.aliases and name not in code.co_freevars:
                cells[name] = self._places_of(found.aliases[name], frame, code, line)
            else:
                known = frame.cells if name in code.co_freevars else frame.locals
                cells[name] = [known[name]] if name in known else []
        calls = [(args, named) for made, args, named in found.local_calls if made is inner]
        for args, named in calls or [([], {})]:
            given = {**dict(zip(inner.co_varnames, args, strict=False)), **named}
            places = {
                ("local", name): self._places_of(value, frame, code, line)
                for name, value in given.items()
            }
            for way in _ways({**places, **{("cell", name): at for name, at in cells.items()}}):
                yield Frame(
                    frame.globals,
                    {name: place for (kind, name), place in way.items() if kind == "cell"},
                    {name: place for (kind, name), place in way.items() if kind == "local"},
                )

    # Reads and writes ------------------------------------------------------------------------

    def _read(self, path: Value, frame: Frame, code: Any, line: int) -> None:
        for each in self._expanded(path, frame, code) if isinstance(path, Path) else ():
            place = self._follow(each, frame, code, line)
            if place is None:
                continue
            # The container is compared as a whole, which includes the data in it.
            if each == path or not place.text.endswith("]") or not is_data(place.value):
                self._on_read(place)

    def _place_of(self, path: Value, frame: Frame, code: types.CodeType, line: int) -> Place | None:
        return self._follow(path, frame, code, line) if isinstance(path, Path) else None

    def _places_of(
        self, value: Value, frame: Frame, code: types.CodeType, line: int
    ) -> list[Place]:
        """The places that a value may stand for: of each branch, and of each item of a loop."""
        found = value.values if isinstance(value, OneOf) else (value,)
        paths = [each for each in found if isinstance(each, Path)]
        expanded = [each for path in paths for each in self._expanded(path, frame, code)]
        places = [self._follow(each, frame, code, line) for each in expanded]
        return [place for place in places if place is not None]

    def _write(self, path: Path, frame: Frame, code: types.CodeType, line: int) -> None:
        if not path.steps:
            place = self._follow(path, frame, code, line)
            if place is None and path.scope == "global":  # a name that the step creates
                place = read_at(
                    self._expressions.globals(frame.globals, path.name, None), code, line
                )
            if place is not None:
                self.writes.append(Write(None, ("name", path.name), place))
            return
        owner = self._follow(path.parent(), frame, code, line)
        if owner is not None and owner.text:
            self._on_passed(owner)
            kind, key = path.steps[-1]
            place = self._expressions.attribute(owner, key, None) if kind == "attr" else None
            if place is None:
                place = extend(owner, "[...]" if key is None else f"[{key!r}]", None)
            self.writes.append(Write(owner, (kind, key), read_at(place, code, line)))

    # Calls ------------------------------------------------------------------------------------

    def _call(self, call: Call, frame: Frame, code: types.CodeType) -> None:
        if call.path.scope == "super":
            self._call_super(call, frame, code)
            return
        if call.path.steps and self._call_on_container(call, frame, code):
            return
        place = self._follow(call.path, frame, code, call.line)
        given = [*call.args, *call.keywords.values()]
        if place is not None and is_callback(place.value):
            # The host calls this function at every step, so the values that it reads stay current.
            kept = self._place_of(given.pop(0), frame, code, call.line) if given else None
            if kept is not None and not is_data(kept.value):  # not the list of `seen.append`
                self._record(kept)
        place = None if place is None else _unwrapped(place)
        if place is None or not is_users_function(place.value):
            for path in (call.path, *given):
                self._read(path, frame, code, call.line)
            return
        self._record(place)
        called: Any = place.value
        owner: Place | None = None
        if not isinstance(called, types.FunctionType):
            owner = self._expressions.object(called.__self__, "`self`")
            if call.path.steps and not isinstance(called.__self__, type):
                owner = self._follow(call.path._replace(steps=call.path.steps[:-1]), frame, code, 0)
        for args, named in self._arguments(call, frame, code):
            if isinstance(called, types.FunctionType):
                self._function(place, args, named)
            else:
                self._method(owner, called.__func__, args, named)

    def _arguments(
        self, call: Call, frame: Frame, code: types.CodeType
    ) -> Iterator[tuple[list[Place | None], dict[str, Place | None]]]:
        """The places of a call's arguments, None for each unknown one; for each item of a loop."""
        given = dict[Any, Value](enumerate(call.args)) | call.keywords
        starred = self._place_of(call.starred, frame, code, call.line)
        more = starred.value if starred is not None else None
        places = {key: self._places_of(a, frame, code, call.line) for key, a in given.items()}
        for way in _ways(places):
            args = [way.get(index) for index in range(len(call.args))]
            args += more if isinstance(more, StarArguments) else []
            yield args, {name: way.get(name) for name in call.keywords}

    def _call_super(self, call: Call, frame: Frame, code: types.CodeType) -> None:
        """Analyzes `super().call(x)`: the method of the next class in the MRO."""
        here = frame.cells.get("__class__")
        owner = frame.locals.get(code.co_varnames[0]) if code.co_varnames else None
        if here is None or owner is None or not call.path.steps:
            return
        kinds = type(owner.value).__mro__
        name = call.path.steps[0][1]
        later = kinds[kinds.index(here.value) + 1 :] if here.value in kinds else ()
        found = next((vars(kind)[name] for kind in later if name in vars(kind)), None)
        for args, named in self._arguments(call, frame, code):
            self._method(owner, found, args, named)

    def _call_on_container(self, call: Call, frame: Frame, code: types.CodeType) -> bool:
        """Analyzes a call of a container's method, if it is one: `seen.append(...)`."""
        kind, name = call.path.steps[-1]
        owner = self._follow(call.path._replace(steps=call.path.steps[:-1]), frame, code, call.line)
        if kind != "attr" or owner is None or not isinstance(owner.value, CONTAINERS):
            return False
        for path in (*call.args, *call.keywords.values()):
            self._read(path, frame, code, call.line)
        key = call.args[0] if call.args else None
        if name in MUTATORS and owner.text:
            self._on_passed(owner)
            self.writes.append(Write(owner, ("call", name), read_at(owner, code, call.line)))
        elif name == "get" and isinstance(key, Constant) and isinstance(owner.value, dict):
            found = extend(owner, f".get({key.value!r})", owner.value.get(key.value))
            self._on_read(read_at(found, code, call.line))
        else:
            self._on_read(owner)
        return True


def _parts(path: Path, value: Any, names: AllNames) -> list[Path]:
    """The attributes of an object that code names, or the items of a container."""
    if isinstance(value, (list, tuple, dict)):
        return [path.then("item", key) for key, _ in few_items(value)]
    return [path.then("attr", name) for name in names.attributes]


_reported: set[str] = set()


def _report_unknown(unknown: str) -> None:
    """Says once that some code can only be analyzed by its names."""
    if unknown not in _reported:
        _reported.add(unknown)
        log.warning(
            "trainstep does not know %s. It watches every global, variable and attribute that the "
            "code of a step names, so it may retrace for a value that the step does not read",
            unknown,
        )


def _ways(choices: Mapping[Any, Sequence[Place]]) -> Iterator[dict[Any, Place]]:
    """Chooses a place for each key, so often that each of the places is chosen."""
    for way in range(max(map(len, choices.values()), default=1) or 1):
        yield {key: places[min(way, len(places) - 1)] for key, places in choices.items() if places}


def _identity(place: Place) -> str:
    """A key that identifies a place; values that are new at each access have none."""
    made = isinstance(place.value, (StarArguments, types.MethodType))
    return place.text or ("" if made else f"#{id(place.value)}")


def _unwrapped(place: Place) -> Place:
    """The user's function inside a library's decorator, such as `contextmanager`."""
    value = place.value
    while isinstance(value, types.FunctionType) and not is_users_function(value):
        inner = getattr(value, "__wrapped__", None)
        if not isinstance(inner, types.FunctionType):
            break
        place, value = extend(place, ".__wrapped__", inner, ""), inner
    return place
