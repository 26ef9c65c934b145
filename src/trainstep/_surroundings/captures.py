"""Values that a step took from around it while it was traced, and whether they are still the same.

A compiled step holds every Python number, string and array that it read as a constant, and was
shaped by every function and object that it met. So each is looked at again at every call, by an
expression that is written into the path of a hit: `globals["alpha"] is not seen[0]`. A value that
is another object and yet equal costs a closer look, once.

How values are compared:

    kept, kept_array --> what a quick look compares with
    token            --> what a close look compares: two values that mean the same have equal ones

Objects are compared by reference, never by number: another object may get the number of one that
has died. Nothing here keeps an object alive that can be referred to weakly.
"""

from __future__ import annotations

import copy
import datetime
import decimal
import fractions
import pathlib
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import call, is_
from typing import Any, NamedTuple

import numpy as np

from trainstep._common.codegen import Source, define
from trainstep._explain.signature import Part, array_text, distinct
from trainstep._surroundings.keras_objects import is_keras
from trainstep._surroundings.places import Place, reference
from trainstep._surroundings.value_kinds import CONTAINERS, GONE, SCALARS

_SHOWN = 60
_FEW = 4  # numbers of an array that are shown
LARGE = 1 << 20  # bytes of an array that are compared at every call
MANY = 4096  # things in containers that are; arrays weigh more
STRUCTURES = (*CONTAINERS, tuple, frozenset)
BY_VALUE = (
    range,
    slice,
    fractions.Fraction,
    decimal.Decimal,
    datetime.timedelta,
    datetime.date,
    datetime.time,
    pathlib.PurePath,
)


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


# Arrays ------------------------------------------------------------------------------------


def is_mutable_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor, which counts its changes in place."""
    return hasattr(type(value), "_version") and hasattr(type(value), "__torch_function__")


def kept_array(value: Any) -> tuple[Any, tuple[int, ...], bytes]:
    return value.dtype, value.shape, value.tobytes()


def other_array(value: Any, seen: tuple[Any, tuple[int, ...], bytes]) -> bool:
    """Whether an array is another than it was, bit by bit."""
    return (value.dtype, value.shape, value.tobytes()) != seen


# Containers --------------------------------------------------------------------------------


def is_large(value: Any) -> bool:
    """Whether a value is too large to be compared at every call."""
    if isinstance(value, np.ndarray):
        return value.nbytes > LARGE or value.dtype == object
    return isinstance(value, STRUCTURES) and _weight(value, MANY) <= 0


def _weight(value: Any, left: int) -> int:
    """What is left of a budget after looking at everything in a container."""
    for item in value.values() if isinstance(value, dict) else value:
        if left <= 0:
            break
        if isinstance(item, STRUCTURES):
            left = _weight(item, left - 1)
        elif isinstance(item, np.ndarray):
            left -= MANY if is_large(item) else 16 + item.nbytes // 64
        else:
            left -= 1
    return left


def kept(value: Any) -> Any:
    """What a container is compared with: quickly if it holds plain values, or objects alone."""
    if not is_large(value):
        if _is_plain(value):
            return _copy(value)
        if type(value) in (list, tuple, dict) and all(map(_is_object, _values(value))):
            keys = list(value) if type(value) is dict else None
            return _Objects(type(value), keys, [reference(each) for each in _values(value)])
    return _Token(token(value))


class _Token(NamedTuple):
    token: Any


class _Objects(NamedTuple):
    """The objects of a list, a tuple or a dict, held weakly."""

    kind: Any
    keys: list[Any] | None
    refs: list[Any]


def other_contents(value: Any, before: Any) -> bool:
    """Whether a container has other contents than it had."""
    if type(before) is _Objects:
        if type(value) is not before.kind or len(value) != len(before.refs):
            return True
        if before.keys is not None and list(value) != before.keys:
            return True
        return not all(map(is_, _values(value), map(call, before.refs)))
    if type(before) is _Token:
        return bool(token(value) != before.token)
    return type(value) is not type(before) or value != before


def _values(value: Any) -> Any:
    return value.values() if type(value) is dict else value


def _is_object(item: Any) -> bool:
    known = (*SCALARS, *STRUCTURES, *BY_VALUE, np.ndarray, types.MethodType)
    return not isinstance(item, known) and not is_mutable_tensor(item)


def _is_plain(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value
    keys = isinstance(value, dict) and not all(isinstance(key, SCALARS) for key in value)
    return not keys and all(
        _is_plain(item) if type(item) in (list, dict, tuple) else isinstance(item, SCALARS)
        for item in items
    )


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return copy.copy(value) if not value else type(value)(_pairs(value))
    if type(value) in (list, tuple):
        return type(value)([_copy(x) if type(x) in (list, dict, tuple) else x for x in value])
    return copy.copy(value)


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    return [(k, _copy(v) if type(v) in (list, dict, tuple) else v) for k, v in value.items()]


# Tokens ------------------------------------------------------------------------------------


class _Same:
    """An object by identity, also after another has taken over its number."""

    __slots__ = ("_ref",)

    def __init__(self, value: Any) -> None:
        self._ref = reference(value)

    def __eq__(self, other: object) -> bool:
        mine = self._ref()
        return isinstance(other, _Same) and mine is not None and mine is other._ref()

    __hash__ = None  # type: ignore[assignment]


def token(value: Any) -> Any:
    """What two values that mean the same to a step have in common."""
    if isinstance(value, SCALARS):
        return (type(value), repr(value))  # 0.0 and -0.0, 1 and True are not the same
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, _Same(value) if is_large(value) else value.tobytes())
    if isinstance(value, STRUCTURES):
        return (type(value), _Same(value) if is_large(value) else _contents(value))
    if isinstance(value, types.FunctionType) and value.__closure__ is None:
        defaults = [token(each) for each in value.__defaults__ or ()]
        return (value.__code__, defaults)  # defined again, and the same
    if isinstance(value, types.MethodType):
        return (_Same(value.__self__), token(value.__func__))
    if isinstance(value, BY_VALUE):
        return (type(value), value)
    return (_Same(value), value._version if is_mutable_tensor(value) else None)


def brief(found: Any) -> Any:
    """A token without the bytes of arrays, for the ledger, which keeps it for ever."""
    if isinstance(found, (tuple, list)):
        return [brief(each) for each in found]
    return hash(found) if isinstance(found, bytes) else found


def _contents(value: Any) -> list[Any]:
    """What is in a container."""
    if isinstance(value, dict):
        return [(token(key), token(item)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(item) for item in value)
    return [token(item) for item in value]
