"""Python written for one program, so that a call of it runs in few frames.

After a step has run, the processor's caches hold the step's data, and Python is slow: a frame
costs microseconds, a tenth of a small step. So what a hit does is written out as one function, of
pieces that their owners give as `Source`: text, and what the names in it mean.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Source:
    """A piece of Python, and what its names mean."""

    text: str
    names: Mapping[str, Any] = field(default_factory=dict)


def define(head: str, body: str, names: Mapping[str, Any]) -> Callable[..., Any]:
    """The function `def head: body`."""
    scope = dict(names)
    exec(f"def {head}:\n{textwrap.indent(body, '    ')}", scope)
    made: Callable[..., Any] = scope[head.partition("(")[0]]
    return made
