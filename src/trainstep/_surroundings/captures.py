"""Values that a step took from around it while it was traced, and whether they are still the same.

A compiled step holds every Python number, string and array that it read as a constant, and was
shaped by every function and object that it met. So each is looked at again at every call, by an
expression that is written into the path of a hit: `globals["alpha"] is not seen[0]`. A value that
is another object and yet equal costs a closer look, once.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from trainstep._common.codegen import Source, define
from trainstep._explain.signature import Part, array_text, distinct
from trainstep._surroundings.equality import (
    BY_VALUE,
    STRUCTURES,
    brief,
    is_large,
    is_mutable_tensor,
    kept,
    kept_array,
    other_array,
    other_contents,
    token,
)
from trainstep._surroundings.expressions import reference
from trainstep._surroundings.keras_objects import is_keras
from trainstep._surroundings.places import GONE, SCALARS, Place

_SHOWN = 60
_FEW = 4  # numbers of an array that are shown


class Captures:
    """The values around one program.

    Args:
        places: What the step read, and where.
        names: What the names in their expressions mean.

    Attributes:
        source: An expression that is false if all are as they were; `cells` in it is the closure
            of the function that is called. Empty if there are none.
        unwatched: What is too large to be compared at every call.
        sites: The file and the line where each is read, by its label.
    """

    def __init__(self, places: Sequence[Place], names: dict[str, Any]) -> None:
        self._names = {**names, "cap_other": other_contents, "cap_differs": other_array}
        self._watched: list[_Watched] = []
        self._together: dict[int, tuple[list[Any], int]] = {}  # where else what was seen is kept
        self.unwatched: list[Place] = []
        tests: list[str] = []
        settings: dict[str, list[Place]] = {}  # numbers of layers and the like, by owner
        for place in places:
            if place.owned and isinstance(place.value, SCALARS):
                settings.setdefault(place.text.rpartition(".")[0], []).append(place)
                continue
            made = self._made(place)
            if made is not None:
                self._watched.append(made)
                tests.append(made.test)
        for owner, owned in settings.items():
            tests.append(self._setting(owner, owned))
        labels = distinct(each.label for each in self._watched)
        for each, label in zip(self._watched, labels, strict=True):
            each.label = label
        self.sites = {each.label: each.site for each in self._watched}
        self._names["cap_seen"] = [w.seen for w in self._watched]
        self.source = Source(" or ".join(tests), self._names)
        self._stale = define("stale(cells)", f"return {self.source.text or False}", self._names)

    def _made(self, place: Place) -> _Watched | None:
        """How a value is watched; None if it cannot be, whatever the user's object does."""
        try:
            if is_large(place.value):
                self.unwatched.append(place)
            return _watched(place, len(self._watched))
        except Exception:
            return None

    def _setting(self, owner: str, owned: list[Place]) -> str:
        """The test of the numbers of one object, looked at together."""
        first = len(self._watched)
        self._watched += [_Watched(place, "", _as_is) for place in owned]
        if len(owned) == 1:
            return f"{owned[0].text} is not cap_seen[{first}]"
        names = [place.text.rpartition(".")[2] for place in owned]
        together = self._names[f"cap_seen{first}"] = [place.value for place in owned]
        self._together.update((first + at, (together, at)) for at in range(len(owned)))
        return f"[(o := {owner}).{', o.'.join(names)}] != cap_seen{first}"

    def holds(self, cells: Any) -> bool:
        """Whether all are as they were: at a glance, or, if something is new, by a closer look."""
        try:
            if not self._stale(cells):
                return True
        except Exception:  # something is gone
            return False
        return not any(self._changed(index, cells) for index in range(len(self._watched)))

    def changes(self, cells: Any) -> Iterator[tuple[str, str, str]]:
        """What is different: where it is read, what it was, what it is."""
        for index, each in enumerate(self._watched):
            if self._changed(index, cells):
                yield each.label, each.shown, _shown(self._now(index, cells))

    def accept(self, cells: Any) -> None:
        """Takes the values as they are now as good as those of the trace."""
        for index, each in enumerate(self._watched):
            now = self._now(index, cells)
            if now is not GONE:
                each.accepted = token(now)
                self._saw(index, now)

    def parts(self, cells: Any) -> Iterator[Part]:
        """The values as they are now, for a signature."""
        for index, each in enumerate(self._watched):
            now = self._now(index, cells)
            yield Part(each.label, _shown(now), "capture", brief(token(now)))

    def _now(self, index: int, cells: Any) -> Any:
        each = self._watched[index]
        try:
            if each.look is None:
                each.look = define("look(cells)", f"return {each.text}", self._names)
            now = each.look(cells)
            token(now)
        except Exception:
            return GONE
        return now

    def _changed(self, index: int, cells: Any) -> bool:
        each, now = self._watched[index], self._now(index, cells)
        if now is GONE or token(now) not in (each.token, each.accepted):
            return True
        self._saw(index, now)  # another object, and yet the same
        return False

    def _saw(self, index: int, now: Any) -> None:
        """Compares with another value from now on."""
        seen = self._names["cap_seen"][index] = self._watched[index].keep(now)
        together, at = self._together.get(index, ([None], 0))
        together[at] = seen


class _Watched:
    """One value, and the expression that compares it."""

    def __init__(self, place: Place, test: str, keep: Callable[[Any], Any]) -> None:
        self.label = f"{place.label}, read at {place.site}" if place.site else place.label
        self.site = (place.file, place.line)
        self.text = place.text
        self.test = test
        self.keep = keep
        self.seen = keep(place.value)
        self.shown = _shown(place.value)
        self.token = self.accepted = token(place.value)
        self.look: Callable[[Any], Any] | None = None
        compile(test or "0", "<captures>", "eval")


def _as_is(value: Any) -> Any:
    return value


def _watched(place: Place, index: int) -> _Watched | None:
    """How a value is watched; None if it has nothing that could go stale."""
    value, text = place.value, place.text
    seen = f"cap_seen[{index}]"
    if isinstance(value, SCALARS):
        return _Watched(place, f"{text} is not {seen}", _as_is)
    if isinstance(value, np.ndarray) and not is_large(value):
        return _Watched(place, f"cap_differs({text}, {seen})", kept_array)
    if isinstance(value, STRUCTURES):
        return _Watched(place, f"cap_other({text}, {seen})", kept)
    if is_mutable_tensor(value):
        test = f"{text} is not {seen}[0]() or {text}._version != {seen}[1]"
        return _Watched(place, test, _with_version)
    if isinstance(value, types.MethodType):  # made anew at each look
        return _Watched(place, f"{text} != {seen}()", _method)
    if isinstance(value, BY_VALUE):
        return _Watched(place, f"{text} is not {seen}", _as_is)
    return _Watched(place, f"{text} is not {seen}()", reference)


def _with_version(tensor: Any) -> tuple[Any, int]:
    return weakref.ref(tensor), tensor._version


def _method(value: Any) -> Any:
    try:
        return weakref.WeakMethod(value)
    except TypeError:
        return reference(value)


def _shown(value: Any) -> str:
    """A value in a few words."""
    if value is GONE:
        return "gone"
    if isinstance(value, np.ndarray):
        kind = array_text(value.shape, value.dtype.name)
        return f"{kind} {value.tolist()}" if value.size <= _FEW else f"array {kind}"
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return f"function `{value.__qualname__}`"
    plain = (*SCALARS, *STRUCTURES, *BY_VALUE)
    try:
        text = repr(value) if isinstance(value, plain) and not is_large(value) else ""
    except Exception:
        text = ""
    if not text:
        name = getattr(value, "name", None) if is_keras(value) else None
        text = f"{type(value).__name__} {name!r}" if isinstance(name, str) else type(value).__name__
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
