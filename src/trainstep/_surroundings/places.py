"""Places: values around a step, each with the expression that finds it again.

An expression starts at a dict of globals, at the closure of the step (`cells`), or at a reference,
weak where possible. `Expressions` builds them and has the object behind each name in them.
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
    """A value, and the expression (`text`) that finds it again.

    A place without a text is analyzed and not watched: it is part of an argument, which is an
    input of the program or in its signature.
    """

    label: str
    text: str
    value: Any
    file: str = ""
    line: int = 0
    owned: bool = False  # whether it is an attribute of a Keras object, read by Keras itself

    @property
    def site(self) -> str:
        """The user's line that reads it."""
        return user_code.name(self.file, self.line) if self.file else ""


@dataclass(frozen=True, slots=True)
class Given:
    """An argument whose parts are inputs of the program, such as a JAX pytree."""

    value: Any


@dataclass(frozen=True, slots=True)
class Write:
    """A change that a step's code makes outside of the step."""

    owner: Place | None  # None: a name
    key: tuple[str, Any]  # ("attr", "alpha"), ("item", "lr"), ("call", "append"), ("name", "n")
    place: Place


def extend(place: Place, text: str, value: Any, shown: str | None = None) -> Place:
    """The place that is found by appending text to another's; `shown` is for its label."""
    added = text if shown is None else shown
    quoted = place.label.endswith("`")
    longer = f"{place.label[:-1]}{added}`" if quoted else place.label + added
    return Place(longer, place.text and place.text + text, value, place.file, place.line)


def read_at(place: Place, code: types.CodeType, line: int) -> Place:
    """The same place, read at another line."""
    return Place(place.label, place.text, place.value, code.co_filename, line, place.owned)


class Expressions:
    """Builds places, and names the objects in their expressions.

    Attributes:
        names: The object, or the reference to it, behind each name.
    """

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self._by_id: dict[int, str] = {}
        self._held: list[Any] = []  # keeps the objects alive, so that no id is used twice

    def _name(self, value: Any, prefix: str, meaning: Any) -> str:
        name = self._by_id.get(id(value))
        if name is None:
            name = self._by_id[id(value)] = f"cap_{prefix}{len(self.names)}"
            self.names[name] = meaning
            self._held.append(value)
        return name

    def object(self, value: Any, label: str) -> Place | None:
        """The place of an object, by reference; None for modules and variables."""
        if isinstance(value, types.ModuleType) or is_variable(value):
            return None
        return Place(label, f"{self._name(value, 'r', reference(value))}()", value)

    def globals(self, found: Mapping[str, Any], name: str, value: Any) -> Place:
        """The place of a global."""
        return Place(f"global `{name}`", f"{self._name(found, 'g', found)}[{name!r}]", value)

    def item(self, place: Place, key: Any, value: Any) -> Place:
        """The place of an item of a container."""
        if type(key) in _LITERAL:
            return extend(place, f"[{key!r}]", value)
        name = f"cap_k{len(self.names)}"
        self.names[name] = key
        return extend(place, f"[{name}]", value, f"[{_short(key)}]")

    def attribute(self, place: Place, name: str, value: Any) -> Place:
        """The place of an attribute."""
        if not place.text or (name.isidentifier() and not keyword.iskeyword(name)):
            return extend(place, f".{name}", value)
        found = extend(place, "", value, f".{name}")
        return Place(found.label, f"getattr({place.text}, {name!r})", value, found.file, found.line)

    def closure(self, fn: types.FunctionType) -> str:
        """The expression of a function's closure."""
        return f"{self._name(fn, 'r', reference(fn))}().__closure__"


class _StrongReference:
    """Replaces a weak reference to an object that does not support one."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self) -> Any:
        return self._value


def reference(value: Any) -> Any:
    """A weak reference to an object, or a strong one if it does not support weak ones."""
    try:
        return weakref.ref(value)
    except TypeError:
        return _StrongReference(value)


def _short(key: Any) -> str:
    try:
        text = repr(key)
    except Exception:
        text = f"a {type(key).__name__}"
    return text if len(text) <= 30 else f"{text[:27]}..."
