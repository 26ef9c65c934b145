"""Words for what a piece of code does, as read off its bytecode.

A `Path` begins at a name (a global, a variable of an enclosing function, a parameter) and goes on
by attributes and constant keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple


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
