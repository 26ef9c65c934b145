"""The model of a piece of code: its reads, writes and calls, and the values of its names.

A `Path` begins at a name (a global, a variable of an enclosing function, a parameter) and continues
with attributes and constant keys. A `Frame` has the values of the names in a piece of code: its
globals, its closure and its arguments.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any, NamedTuple

from trainstep._surroundings.places import Place

CONTENTS = ".cell_contents"


class Path(NamedTuple):
    """A name, followed by attributes and keys."""

    scope: str  # "global", "free" (of an enclosing function), "local" (a parameter) or "super"
    name: str
    steps: tuple[tuple[str, Any], ...] = ()  # ("attr", "alpha"), ("item", "lr"), ("each", None)

    def then(self, kind: str, key: Any) -> Path:
        """The path with one more step."""
        return self._replace(steps=(*self.steps, (kind, key)))

    def parent(self) -> Path:
        """The path without its last step."""
        return self._replace(steps=self.steps[:-1])


class Constant(NamedTuple):
    """A constant on the stack."""

    value: Any


class LocalFunction(NamedTuple):
    """A function that the code defines."""

    code: CodeType


class OneOf(NamedTuple):
    """One of several values, which depends on a branch."""

    values: tuple[Any, ...]


Value = Path | Constant | LocalFunction | OneOf | None  # on the stack; None: unknown


@dataclass(slots=True)
class Call:
    """A call of the value at a path."""

    path: Path
    args: list[Value]
    keywords: dict[str, Value]
    line: int
    starred: Path | None = None  # `f(*args)`


@dataclass(slots=True)
class Scan:
    """The reads, writes and calls of a piece of code."""

    reads: dict[Path, int] = field(default_factory=dict)  # the first line of each
    writes: dict[Path, int] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    inner: list[CodeType] = field(default_factory=list)  # functions and comprehensions inside
    # The calls of those: positional and keyword arguments.
    local_calls: list[tuple[CodeType, list[Value], dict[str, Value]]] = field(default_factory=list)
    # Local names that stand for a path or a local function.
    aliases: dict[str, Path | LocalFunction | OneOf] = field(default_factory=dict)
    # What the variables of comprehensions stand for in the functions that are defined there.
    inside: dict[CodeType, dict[str, Value]] = field(default_factory=dict)
    unknown: str = ""  # why the code could not be analyzed to its end; "": it was


class StarArguments(list["Place | None"]):
    """The places of the arguments in `*args`."""


@dataclass(slots=True)
class Frame:
    """The names of a piece of code whose places are known."""

    globals: Mapping[str, Any]
    cells: dict[str, Place]
    locals: dict[str, Place]


class AllNames(NamedTuple):
    """All names in a piece of code and in the functions that it defines."""

    roots: list[Path]  # its globals, variables and arguments
    attributes: list[str]
    keywords: list[str]  # possibly those of its calls

    @classmethod
    def of(cls, code: CodeType, frame: Frame) -> AllNames:
        """The names of a piece of code."""
        codes = [code]
        for each in codes:  # grows
            codes += [inner for inner in each.co_consts if isinstance(inner, CodeType)]
        names = dict.fromkeys(name for each in codes for name in each.co_names)
        constants = [value for each in codes for value in each.co_consts]
        texts = [value for value in constants if isinstance(value, str)]  # of `getattr`
        tuples = [value for value in constants if isinstance(value, tuple)]
        keywords = dict.fromkeys(name for each in tuples for name in each if isinstance(name, str))
        roots = [Path("global", name) for name in names if name in frame.globals]
        roots += [Path("free", name) for name in frame.cells if name != "__class__"]
        roots += [Path("local", name) for name in frame.locals]
        return cls(roots, [*dict.fromkeys([*names, *texts])], [*keywords])


def closure_places(fn: types.FunctionType, text: str) -> dict[str, Place]:
    """The places of a function's closure variables; `text` is the expression of its closure."""
    found = {}
    for index, name in enumerate(fn.__code__.co_freevars):
        try:
            value = (fn.__closure__ or ())[index].cell_contents
        except (ValueError, IndexError):  # not bound yet
            continue
        found[name] = Place(f"closure variable `{name}`", f"{text}[{index}]{CONTENTS}", value)
    return found


def bind_arguments(
    fn: types.FunctionType,
    text: str,
    args: Sequence[Place | None],
    named: Mapping[str, Place | None],
) -> dict[str, Place]:
    """The parameters of a function whose places are known: arguments and defaults.

    Args:
        fn: The function.
        text: The expression that finds it; without one, its defaults are left out.
        args: The positional arguments; None for each unknown one.
        named: The keyword arguments.
    """
    code = fn.__code__
    names = code.co_varnames[: code.co_argcount]
    given: dict[str, Place | None] = {**dict(zip(names, args, strict=False)), **named}
    if code.co_flags & inspect.CO_VARARGS:
        rest = code.co_varnames[code.co_argcount + code.co_kwonlyargcount]
        given[rest] = Place("", "", StarArguments(args[len(names) :]))
    defaults = fn.__defaults__ or ()
    first = len(names) - len(defaults)
    found = [(names[first + i], f"__defaults__[{i}]", value) for i, value in enumerate(defaults)]
    by_name = fn.__kwdefaults__ or {}
    found += [(name, f"__kwdefaults__[{name!r}]", value) for name, value in by_name.items()]
    for name, where, value in found if text else ():
        label = f"default of `{fn.__name__}`: `{name}`"
        given.setdefault(name, Place(label, f"{text}.{where}", value))
    # An object that is an argument is labeled with the name of the parameter.
    return {
        name: replace(place, label=f"`{name}`") if place.label.startswith("`") else place
        for name, place in given.items()
        if place is not None
    }
