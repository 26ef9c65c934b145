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

from trainstep._places import CONTAINERS, SCALARS, Place
from trainstep._reach import GONE
from trainstep._signature import Part, distinct
from trainstep._source import Source, define

LARGE = 1 << 20  # bytes of an array that are compared at every call
_SHOWN = 60


class Captures:
    """The values around one program.

    Args:
        places: What the step read, and where.
        names: What the names in their expressions mean.

    Attributes:
        source: An expression that is false if all are as they were; `cells` in it is the closure
            of the function that is called. Empty if there are none.
        unwatched: Arrays that are too large to be compared at every call.
    """

    def __init__(self, places: Sequence[Place], names: dict[str, Any]) -> None:
        self._names = {**names, "cap_contents": contents, "cap_differs": _differs}
        self._watched: list[_Watched] = []
        self.unwatched: list[Place] = []
        tests: list[str] = []
        settings: dict[str, list[Place]] = {}  # of layers and the like, by owner
        for place in places:
            if place.owned:
                settings.setdefault(place.text.rpartition(".")[0], []).append(place)
                continue
            made = _watched(place, len(self._watched))
            if made is not None:
                self._watched.append(made)
                tests.append(made.test)
            if isinstance(place.value, np.ndarray) and place.value.nbytes > LARGE:
                self.unwatched.append(place)
        for owner, owned in settings.items():
            first = len(self._watched)
            self._watched += [_Watched(place, "", lambda v: v) for place in owned]
            names_of = [place.text.rpartition(".")[2] for place in owned]
            if len(owned) == 1:
                tests.append(f"{owned[0].text} is not cap_seen[{first}]")
                continue
            now = f"[(o := {owner}).{', o.'.join(names_of)}]"
            tests.append(f"{now} != cap_seen[{first}:{first + len(owned)}]")
        labels = distinct(each.label for each in self._watched)
        for each, label in zip(self._watched, labels, strict=True):
            each.label = label
        self._seen = [w.seen for w in self._watched]
        self._names["cap_seen"] = self._seen
        self.source = Source(" or ".join(tests), self._names)

    def holds(self, cells: Any) -> bool:
        """Whether all are as they were."""
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
                each.accepted, self._seen[index] = token(now), each.keep(now)

    def parts(self, cells: Any) -> Iterator[Part]:
        """The values as they are now, for a signature."""
        for index, each in enumerate(self._watched):
            now = self._now(index, cells)
            yield Part(each.label, _shown(now), "capture", token(now))

    def _now(self, index: int, cells: Any) -> Any:
        each = self._watched[index]
        if each.look is None:
            each.look = define("look(cells)", f"return {each.text}", self._names)
        try:
            return each.look(cells)
        except Exception:
            return GONE

    def _changed(self, index: int, cells: Any) -> bool:
        each, now = self._watched[index], self._now(index, cells)
        if now is GONE or token(now) not in (each.token, each.accepted):
            return True
        self._seen[index] = each.keep(now)  # another object, and yet the same
        return False


class _Watched:
    """One value, and the expression that compares it."""

    def __init__(self, place: Place, test: str, keep: Callable[[Any], Any], text: str = "") -> None:
        self.label = f"{place.label}, read at {place.site}" if place.site else place.label
        self.text = text or place.text
        self.test = test
        self.keep = keep
        self.seen = keep(place.value)
        self.shown = _shown(place.value)
        self.token = self.accepted = token(place.value)
        self.look: Callable[[Any], Any] | None = None


def _watched(place: Place, index: int) -> _Watched | None:
    """How a value is watched; None if it has nothing that could go stale."""
    value, text = place.value, place.text
    seen = f"cap_seen[{index}]"
    if isinstance(value, SCALARS):
        return _Watched(place, f"{text} is not {seen}", lambda v: v)
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return None
        if value.nbytes <= LARGE:
            return _Watched(place, f"cap_differs({text}, {seen})", np.copy)
    if isinstance(value, (*CONTAINERS, tuple, frozenset)):
        return _Watched(place, f"cap_contents({text}) != {seen}", contents)
    if hasattr(value, "_version"):  # a torch tensor counts its changes in place
        kept = lambda v: (weakref.ref(v), v._version)  # noqa: E731
        test = f"{text} is not {seen}[0]() or {text}._version != {seen}[1]"
        return _Watched(place, test, kept)
    if isinstance(value, types.MethodType):  # made anew at each look
        return _Watched(place, f"{text} != {seen}()", weakref.WeakMethod)
    try:
        weakref.ref(value)
    except TypeError:
        return None
    return _Watched(place, f"{text} is not {seen}()", weakref.ref)


def token(value: Any) -> Any:
    """What two values that mean the same to a step have in common."""
    if isinstance(value, SCALARS):
        return (type(value), repr(value))  # 0.0 and -0.0, 1 and True are not the same
    if isinstance(value, np.ndarray):
        large = value.nbytes > LARGE or value.dtype == object
        return (value.dtype.str, value.shape, id(value) if large else value.tobytes())
    if isinstance(value, (*CONTAINERS, tuple, frozenset)):
        return contents(value)
    if isinstance(value, types.FunctionType) and value.__closure__ is None:
        return (value.__code__, value.__defaults__)  # defined again, and the same
    if isinstance(value, types.MethodType):
        return (id(value.__self__), token(value.__func__))
    return (id(value), getattr(value, "_version", None))


def contents(value: Any, depth: int = 3) -> Any:
    """What is in a container, as far as a step may have read it."""
    if len(value) > 64:
        return (type(value), len(value), id(value))
    items = value.items() if isinstance(value, dict) else value
    pairs = items if isinstance(value, dict) else enumerate(items)
    if isinstance(value, (set, frozenset)):
        return (type(value), frozenset(value))
    return (type(value), tuple((key, _content(item, depth)) for key, item in pairs))


def _content(item: Any, depth: int) -> Any:
    if isinstance(item, (*CONTAINERS, tuple, frozenset)):
        return contents(item, depth - 1) if depth else id(item)
    return token(item)


def _differs(value: Any, seen: np.ndarray) -> bool:
    """Whether an array is another than it was, bit by bit."""
    if type(value) is not np.ndarray or value.shape != seen.shape or value.dtype != seen.dtype:
        return True
    if value.flags.c_contiguous and seen.flags.c_contiguous:
        return value.data.cast("B") != seen.data.cast("B") if value.size else False
    return value.tobytes() != seen.tobytes()


def _shown(value: Any) -> str:
    """A value in a few words."""
    if value is GONE:
        return "gone"
    if isinstance(value, np.ndarray):
        return f"array {value.dtype.name}{list(value.shape)}"
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return f"function `{value.__qualname__}`"
    text = repr(value) if isinstance(value, (*SCALARS, *CONTAINERS, tuple)) else ""
    if not text:
        name = getattr(value, "name", None)
        text = f"{type(value).__name__} {name!r}" if isinstance(name, str) else type(value).__name__
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
