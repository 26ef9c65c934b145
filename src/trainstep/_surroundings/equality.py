"""How values are compared: what is kept of one, and whether another means the same to a step.

    kept, kept_array --> what a quick look compares with
    token         --> what a close look compares: two values that mean the same have equal ones

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
from operator import call, is_
from typing import Any, NamedTuple

import numpy as np

from trainstep._surroundings.expressions import reference
from trainstep._surroundings.places import CONTAINERS, SCALARS

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
