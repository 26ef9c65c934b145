"""Places: values that a step reaches in Python around it, and expressions that find them again.

An expression starts at a dict of globals, at the closure of the step (`cells`), or at a reference,
weak wherever there can be one. `Names` knows what the names in them mean.
"""

from __future__ import annotations

import keyword
import types
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainstep._common import user_code
from trainstep._surroundings.keras_objects import is_variable

_LITERAL = (str, int, bool, bytes, type(None))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value is found, and what it was when it was looked at.

    One without a text is followed and not watched: part of an argument that the program has as an
    input, or is compiled for.
    """

    label: str
    text: str
    value: Any
    file: str = ""
    line: int = 0
    owned: bool = False  # an attribute of a layer or the like, read by Keras

    @property
    def site(self) -> str:
        """The user's line that reads it."""
        return user_code.name(self.file, self.line) if self.file else ""


@dataclass(frozen=True, slots=True)
class Given:
    """An argument whose parts are inputs of the program, as those of a tree of JAX's are."""

    value: Any


@dataclass(frozen=True, slots=True)
class Write:
    """Something outside a step that its code changes."""

    owner: Place | None  # None: a name
    key: tuple[str, Any]  # ("attr", "alpha"), ("item", "lr"), ("call", "append"), ("name", "n")
    place: Place


def further(place: Place, text: str, value: Any, shown: str | None = None) -> Place:
    """A place that is reached from another by some more text; `shown` is what a person reads."""
    added = text if shown is None else shown
    quoted = place.label.endswith("`")
    longer = f"{place.label[:-1]}{added}`" if quoted else place.label + added
    return Place(longer, place.text and place.text + text, value, place.file, place.line)


def at(place: Place, code: types.CodeType, line: int) -> Place:
    return Place(place.label, place.text, place.value, code.co_filename, line, place.owned)


class Names:
    """Gives names.

    Attributes:
        meanings: What they mean.
    """

    def __init__(self) -> None:
        self.meanings: dict[str, Any] = {}
        self._by_id: dict[int, str] = {}
        self._held: list[Any] = []  # an id that has a name stays taken

    def _name(self, value: Any, prefix: str, meaning: Any) -> str:
        name = self._by_id.get(id(value))
        if name is None:
            name = self._by_id[id(value)] = f"cap_{prefix}{len(self.meanings)}"
            self.meanings[name] = meaning
            self._held.append(value)
        return name

    def object(self, value: Any, label: str) -> Place | None:
        """An object by reference; None for what is no object of the user's to look at."""
        if isinstance(value, types.ModuleType) or is_variable(value):
            return None
        return Place(label, f"{self._name(value, 'r', reference(value))}()", value)

    def globals(self, found: Mapping[str, Any], name: str, value: Any) -> Place:
        """A global."""
        return Place(f"global `{name}`", f"{self._name(found, 'g', found)}[{name!r}]", value)

    def item(self, place: Place, key: Any, value: Any) -> Place:
        """An entry of a container."""
        if type(key) in _LITERAL:
            return further(place, f"[{key!r}]", value)
        name = f"cap_k{len(self.meanings)}"
        self.meanings[name] = key
        return further(place, f"[{name}]", value, f"[{_short(key)}]")

    def attribute(self, place: Place, name: str, value: Any) -> Place:
        """An attribute."""
        if not place.text or (name.isidentifier() and not keyword.iskeyword(name)):
            return further(place, f".{name}", value)
        found = further(place, "", value, f".{name}")
        return Place(found.label, f"getattr({place.text}, {name!r})", value, found.file, found.line)

    def closure(self, fn: types.FunctionType) -> str:
        """The closure of a function."""
        return f"{self._name(fn, 'r', reference(fn))}().__closure__"


class _Held:
    """What a weak reference is to an object that cannot be referred to weakly."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self) -> Any:
        return self._value


def reference(value: Any) -> Any:
    """A weak reference to an object, or a strong one if it cannot have one."""
    try:
        return weakref.ref(value)
    except TypeError:
        return _Held(value)


def _short(key: Any) -> str:
    try:
        text = repr(key)
    except Exception:
        text = f"a {type(key).__name__}"
    return text if len(text) <= 30 else f"{text[:27]}..."
