"""The captured values of a step, and the test whether they are unchanged.

A compiled step holds every Python number, string and array that it read during tracing as a
constant, and depends on every function and object that it used. So the fast path compares each at
every call, by a generated expression: `globals["alpha"] is not seen[0]`. A value that is another
object but equal costs one slow comparison.

    snapshot, array_snapshot --> for the fast comparison, at every call
    token                    --> for the slow one: equal for values that mean the same to a step

Objects are compared by reference, never by id: a new object may get the id of a dead one. Nothing
here keeps an object alive that supports weak references.
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

_SHOWN = 60  # characters
_FEW = 4  # numbers: the largest array whose values are shown
_LARGE = 1 << 20  # bytes: the largest array that is compared at every call
_MANY = 4096  # the same for the items of a container; an array counts for several
_STRUCTURES = (*CONTAINERS, tuple, frozenset)
_BY_VALUE = (
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
    """The captured values of one program.

    Args:
        places: The values that the step read, with their expressions.
        names: The objects behind the names in those expressions.

    Attributes:
        source: An expression that is true if a value may have changed; `cells` in it is the
            closure of the called function. Empty if there are no values.
        unwatched: The values that are too large to be compared at every call.
        sites: The file and the line where each value is read, by its label.
    """

    def __init__(self, places: Sequence[Place], names: dict[str, Any]) -> None:
        self._names = {**names, "cap_contents": contents_changed, "cap_array": array_changed}
        self._watched: list[_CapturedValue] = []
        self._grouped: dict[int, tuple[list[Any], int]] = {}  # copies in a grouped test
        self.unwatched: list[Place] = []
        tests: list[str] = []
        settings: dict[str, list[Place]] = {}  # the scalars of Keras objects, by owner
        for place in places:
            if place.owned and isinstance(place.value, SCALARS):
                settings.setdefault(place.text.rpartition(".")[0], []).append(place)
                continue
            made = self._watch(place)
            if made is not None:
                self._watched.append(made)
                tests.append(made.test)
        for owner, owned in settings.items():
            tests.append(self._grouped_test(owner, owned))
        labels = distinct(each.label for each in self._watched)
        for each, label in zip(self._watched, labels, strict=True):
            each.label = label
        self.sites = {each.label: each.site for each in self._watched}
        self._names["cap_seen"] = [w.seen for w in self._watched]
        self.source = Source(" or ".join(tests), self._names)
        self._stale = define("stale(cells)", f"return {self.source.text or False}", self._names)

    def _watch(self, place: Place) -> _CapturedValue | None:
        """Prepares the comparison of a value; None if the user's object raises."""
        try:
            if is_large(place.value):
                self.unwatched.append(place)
            return _watch_value(place, len(self._watched))
        except Exception:
            return None

    def _grouped_test(self, owner: str, owned: list[Place]) -> str:
        """One test for all scalars of an object, which is faster than one for each."""
        first = len(self._watched)
        self._watched += [_CapturedValue(place, "", _as_is) for place in owned]
        if len(owned) == 1:
            return f"{owned[0].text} is not cap_seen[{first}]"
        names = [place.text.rpartition(".")[2] for place in owned]
        together = self._names[f"cap_seen{first}"] = [place.value for place in owned]
        self._grouped.update((first + at, (together, at)) for at in range(len(owned)))
        return f"[(o := {owner}).{', o.'.join(names)}] != cap_seen{first}"

    def holds(self, cells: Any) -> bool:
        """Whether no value has changed, by the fast comparison or, if that fails, the slow one."""
        try:
            if not self._stale(cells):
                return True
        except Exception:  # an object or attribute is gone
            return False
        return not any(self._changed(index, cells) for index in range(len(self._watched)))

    def changes(self, cells: Any) -> Iterator[tuple[str, str, str]]:
        """The changed values: where each is read, the old and the new value."""
        for index, each in enumerate(self._watched):
            if self._changed(index, cells):
                yield each.label, each.shown, _shown(self._now(index, cells))

    def accept(self, cells: Any) -> None:
        """Accepts the current values as equal to those of the trace."""
        for index, each in enumerate(self._watched):
            now = self._now(index, cells)
            if now is not GONE:
                each.accepted = token(now)
                self._update_seen(index, now)

    def parts(self, cells: Any) -> Iterator[Part]:
        """The current values, for a signature."""
        for index, each in enumerate(self._watched):
            now = self._now(index, cells)
            yield Part(each.label, _shown(now), "capture", short_token(token(now)))

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
        self._update_seen(index, now)  # another object, but equal
        return False

    def _update_seen(self, index: int, now: Any) -> None:
        """Makes the fast comparison use another object from now on."""
        seen = self._names["cap_seen"][index] = self._watched[index].keep(now)
        together, at = self._grouped.get(index, ([None], 0))
        together[at] = seen


class _CapturedValue:
    """One captured value, and the expression that compares it."""

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


def _watch_value(place: Place, index: int) -> _CapturedValue | None:
    """Chooses the fast comparison of a value, by its type."""
    value, text = place.value, place.text
    seen = f"cap_seen[{index}]"
    if isinstance(value, SCALARS):
        return _CapturedValue(place, f"{text} is not {seen}", _as_is)
    if isinstance(value, np.ndarray) and not is_large(value):
        return _CapturedValue(place, f"cap_array({text}, {seen})", array_snapshot)
    if isinstance(value, _STRUCTURES):
        return _CapturedValue(place, f"cap_contents({text}, {seen})", snapshot)
    if is_mutable_tensor(value):
        test = f"{text} is not {seen}[0]() or {text}._version != {seen}[1]"
        return _CapturedValue(place, test, _with_version)
    if isinstance(value, types.MethodType):  # a new object at each access
        return _CapturedValue(place, f"{text} != {seen}()", _method)
    if isinstance(value, _BY_VALUE):
        return _CapturedValue(place, f"{text} is not {seen}", _as_is)
    return _CapturedValue(place, f"{text} is not {seen}()", reference)


def _with_version(tensor: Any) -> tuple[Any, int]:
    return weakref.ref(tensor), tensor._version


def _method(value: Any) -> Any:
    try:
        return weakref.WeakMethod(value)
    except TypeError:
        return reference(value)


def _shown(value: Any) -> str:
    """A short text of a value, for messages."""
    if value is GONE:
        return "gone"
    if isinstance(value, np.ndarray):
        kind = array_text(value.shape, value.dtype.name)
        return f"{kind} {value.tolist()}" if value.size <= _FEW else f"array {kind}"
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return f"function `{value.__qualname__}`"
    plain = (*SCALARS, *_STRUCTURES, *_BY_VALUE)
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
    """Whether a value is a torch tensor, which counts its in-place updates."""
    return hasattr(type(value), "_version") and hasattr(type(value), "__torch_function__")


def array_snapshot(value: Any) -> tuple[Any, tuple[int, ...], bytes]:
    """The dtype, shape and bytes of an array."""
    return value.dtype, value.shape, value.tobytes()


def array_changed(value: Any, seen: tuple[Any, tuple[int, ...], bytes]) -> bool:
    """Whether an array differs from its snapshot in any bit."""
    return (value.dtype, value.shape, value.tobytes()) != seen


# Containers --------------------------------------------------------------------------------


def is_large(value: Any) -> bool:
    """Whether a value is too large to be compared at every call."""
    if isinstance(value, np.ndarray):
        return value.nbytes > _LARGE or value.dtype == object
    return isinstance(value, _STRUCTURES) and _weight(value, _MANY) <= 0


def _weight(value: Any, left: int) -> int:
    """The rest of a budget after counting the items of a container."""
    for item in value.values() if isinstance(value, dict) else value:
        if left <= 0:
            break
        if isinstance(item, _STRUCTURES):
            left = _weight(item, left - 1)
        elif isinstance(item, np.ndarray):
            left -= _MANY if is_large(item) else 16 + item.nbytes // 64
        else:
            left -= 1
    return left


def snapshot(value: Any) -> Any:
    """The snapshot of a container: fast to compare for plain values, or for objects only."""
    if not is_large(value):
        if _is_plain(value):
            return _copy(value)
        if type(value) in (list, tuple, dict) and all(map(_is_object, _values(value))):
            keys = list(value) if type(value) is dict else None
            return _ObjectsSnapshot(type(value), keys, [reference(each) for each in _values(value)])
    return _TokenSnapshot(token(value))


class _TokenSnapshot(NamedTuple):
    token: Any


class _ObjectsSnapshot(NamedTuple):
    """Weak references to the objects of a list, a tuple or a dict."""

    kind: Any
    keys: list[Any] | None
    refs: list[Any]


def contents_changed(value: Any, before: Any) -> bool:
    """Whether a container differs from its snapshot."""
    if type(before) is _ObjectsSnapshot:
        if type(value) is not before.kind or len(value) != len(before.refs):
            return True
        if before.keys is not None and list(value) != before.keys:
            return True
        return not all(map(is_, _values(value), map(call, before.refs)))
    if type(before) is _TokenSnapshot:
        return bool(token(value) != before.token)
    return type(value) is not type(before) or value != before


def _values(value: Any) -> Any:
    return value.values() if type(value) is dict else value


def _is_object(item: Any) -> bool:
    known = (*SCALARS, *_STRUCTURES, *_BY_VALUE, np.ndarray, types.MethodType)
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


class _Identity:
    """Equal for the same object only, even if another object has got its id."""

    __slots__ = ("_ref",)

    def __init__(self, value: Any) -> None:
        self._ref = reference(value)

    def __eq__(self, other: object) -> bool:
        mine = self._ref()
        return isinstance(other, _Identity) and mine is not None and mine is other._ref()

    __hash__ = None  # type: ignore[assignment]


def token(value: Any) -> Any:
    """A value that is equal for two values that mean the same to a step."""
    if isinstance(value, SCALARS):
        return (type(value), repr(value))  # 0.0 and -0.0, 1 and True are not the same
    if isinstance(value, np.ndarray):
        contents = _Identity(value) if is_large(value) else value.tobytes()
        return (value.dtype.str, value.shape, contents)
    if isinstance(value, _STRUCTURES):
        return (type(value), _Identity(value) if is_large(value) else _contents(value))
    if isinstance(value, types.FunctionType) and value.__closure__ is None:
        defaults = [token(each) for each in value.__defaults__ or ()]
        return (value.__code__, defaults)  # a function that is defined again may be equal
    if isinstance(value, types.MethodType):
        return (_Identity(value.__self__), token(value.__func__))
    if isinstance(value, _BY_VALUE):
        return (type(value), value)
    return (_Identity(value), value._version if is_mutable_tensor(value) else None)


def short_token(found: Any) -> Any:
    """A token without the bytes of arrays, for the ledger, which keeps it."""
    if isinstance(found, (tuple, list)):
        return [short_token(each) for each in found]
    return hash(found) if isinstance(found, bytes) else found


def _contents(value: Any) -> list[Any]:
    """The tokens of the items of a container."""
    if isinstance(value, dict):
        return [(token(key), token(item)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(item) for item in value)
    return [token(item) for item in value]
