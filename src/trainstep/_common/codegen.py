"""Generates Python functions, so that a cache hit runs in few frames.

After a step has run, the processor's caches hold the step's data and Python is slow: a frame costs
microseconds, a tenth of a small step. So the fast path is generated as one function. Each part of
trainstep contributes a `Source`: text, and the object that each name in the text stands for.

    Source, Source, ... --merge--> names
    text, names         --define-> a function, whose lines tracebacks can show
"""

from __future__ import annotations

import itertools
import linecache
import textwrap
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Source:
    """A piece of Python, and the objects that its names stand for."""

    text: str
    names: Mapping[str, Any] = field(default_factory=dict)


def merge(*sources: Source) -> dict[str, Any]:
    """Joins the names of several sources.

    Raises:
        ValueError: If a name stands for different objects in two of them.
    """
    names: dict[str, Any] = {}
    for source in sources:
        for name, value in source.names.items():
            if names.setdefault(name, value) is not value:
                kinds = f"a {type(names[name]).__name__} and a {type(value).__name__}"
                raise ValueError(f"generated code: `{name}` stands for two objects, {kinds}")
    return names


def define(head: str, body: str, names: Mapping[str, Any]) -> Callable[..., Any]:
    """Compiles `def head: body`; `names` are its globals.

    The function has a file name of its own, such as `<trainstep hit 12>`, and `linecache` has its
    text as long as the function lives.
    """
    name = head.partition("(")[0]
    file = f"<trainstep {name} {next(_numbers)}>"
    text = f"def {head}:\n{textwrap.indent(body, '    ')}\n"
    # With `__name__`, reports of user code skip the function's frames like any of trainstep's.
    scope = {"__name__": __name__, **names}
    exec(compile(text, file, "exec"), scope)
    function: Callable[..., Any] = scope[name]
    # An entry without a time of change is never compared with a file on disk.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    weakref.finalize(function, linecache.cache.pop, file, None).atexit = False
    return function
