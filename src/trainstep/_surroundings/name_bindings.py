"""What names mean in a piece of code: its globals, its closure, and what it was given."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainstep._surroundings.places import Place

CONTENTS = ".cell_contents"


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
