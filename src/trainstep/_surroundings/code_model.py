"""Words for what a piece of code does, as read off its bytecode, and what its names mean.

A `Path` begins at a name (a global, a variable of an enclosing function, a parameter) and goes on
by attributes and constant keys. A `Frame` is what names mean in a piece of code: its globals, its
closure, and what it was given.
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
    """A name, and the attributes and keys that lead on from it."""

    scope: str  # "global", "free" (of an enclosing function), "local" (a parameter) or "super"
    name: str
    steps: tuple[tuple[str, Any], ...] = ()  # ("attr", "alpha"), ("item", "lr"), ("each", None)

    def then(self, kind: str, key: Any) -> Path:
        """One step further."""
        return self._replace(steps=(*self.steps, (kind, key)))

    def before(self) -> Path:
        """One step back."""
        return self._replace(steps=self.steps[:-1])


class Constant(NamedTuple):
    """A constant on the stack."""

    value: Any


class Made(NamedTuple):
    """A function that the code makes itself."""

    code: CodeType


Value = Path | Constant | Made | None  # on the stack; None: unknown


@dataclass(slots=True)
class Call:
    """A call of what a path leads to."""

    path: Path
    args: list[Value]
    keywords: dict[str, Value]
    line: int
    starred: Path | None = None  # `f(*args)`


@dataclass(slots=True)
class Scan:
    """What a piece of code takes from around it."""

    reads: dict[Path, int] = field(default_factory=dict)  # the first line of each
    writes: dict[Path, int] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    inner: list[CodeType] = field(default_factory=list)  # functions and comprehensions inside
    local_calls: list[tuple[CodeType, list[Value]]] = field(default_factory=list)  # of those
    aliases: dict[str, Path | Made] = field(default_factory=dict)  # local names of such things


class Spread(list["Place | None"]):
    """The arguments that `*args` stands for."""


@dataclass(slots=True)
class Frame:
    """The names of a piece of code that lead to known places."""

    globals: Mapping[str, Any]
    cells: dict[str, Place]
    locals: dict[str, Place]


def cells_of(fn: types.FunctionType, text: str) -> dict[str, Place]:
    """What a function closes over; `text` is the expression of its closure."""
    found = {}
    for index, name in enumerate(fn.__code__.co_freevars):
        try:
            value = (fn.__closure__ or ())[index].cell_contents
        except (ValueError, IndexError):  # not bound yet
            continue
        found[name] = Place(f"closure variable `{name}`", f"{text}[{index}]{CONTENTS}", value)
    return found


def bound(
    fn: types.FunctionType,
    text: str,
    args: Sequence[Place | None],
    named: Mapping[str, Place | None],
) -> dict[str, Place]:
    """The parameters of a function whose values are known: what it is given, and defaults.

    Args:
        fn: The function.
        text: The expression that finds it; without one, its defaults are not to be found.
        args: What is passed by position, as far as known.
        named: What is passed by name.
    """
    code = fn.__code__
    names = code.co_varnames[: code.co_argcount]
    given: dict[str, Place | None] = {**dict(zip(names, args, strict=False)), **named}
    if code.co_flags & inspect.CO_VARARGS:
        rest = code.co_varnames[code.co_argcount + code.co_kwonlyargcount]
        given[rest] = Place("", "", Spread(args[len(names) :]))
    defaults = fn.__defaults__ or ()
    first = len(names) - len(defaults)
    found = [(names[first + i], f"__defaults__[{i}]", value) for i, value in enumerate(defaults)]
    by_name = fn.__kwdefaults__ or {}
    found += [(name, f"__kwdefaults__[{name!r}]", value) for name, value in by_name.items()]
    for name, where, value in found if text else ():
        label = f"default of `{fn.__name__}`: `{name}`"
        given.setdefault(name, Place(label, f"{text}.{where}", value))
    # An object that came as an argument is called what the code calls it.
    return {
        name: replace(place, label=f"`{name}`") if place.label.startswith("`") else place
        for name, place in given.items()
        if place is not None
    }
