"""Encodes the values that processes send each other, without pickle.

A pickle runs code of the sender's choice while it is read. These messages hold data only:

    8 bytes          JSON                  bytes
    length of JSON   the nested structure  the elements of its arrays, in order

Supported are None, bool, int, float, str, lists, tuples, dicts with str keys, and NumPy arrays of
numbers, bfloat16 and float8 included. JSON has no tuples and no arrays, and needs to tell dicts
from both; so these three are JSON objects with one key: `tuple`, `dict`, `array`.
"""

from __future__ import annotations

import json
import math
from typing import Any

import ml_dtypes
import numpy as np

from trainstep._common.errors import StrategyError

_LENGTH = 8
# All exceptions that decoding arbitrary bytes can raise.
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
_PLAIN = (type(None), bool, int, float, str)
_NUMPY = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_DTYPES = {name: np.dtype(name) for name in _NUMPY} | {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
}


def encode(value: Any) -> bytes:
    """Returns the message for a value.

    Args:
        value: The value. A NumPy scalar is sent as an array without axes.

    Raises:
        StrategyError: A part of the value has a type or dtype that is not supported.
    """
    elements: list[bytes] = []
    header = json.dumps(_described(value, elements)).encode()
    return b"".join([len(header).to_bytes(_LENGTH, "big"), header, *elements])


def decode(message: bytes) -> Any:
    """Returns the value of a message; its arrays own their memory.

    Raises:
        StrategyError: The message was not written by `encode`.
    """
    try:
        start = _LENGTH + int.from_bytes(message[:_LENGTH], "big")
        reader = _Reader(message, start)
        value = reader.value(json.loads(message[_LENGTH:start]))
        if reader.offset != len(message):
            raise ValueError(f"{len(message) - reader.offset} bytes too many")
    except _MALFORMED as error:
        raise StrategyError(
            "a message of another process cannot be read.\n"
            "  expected: a message of the same version of trainstep\n"
            f"  got:      {len(message)} bytes ({type(error).__name__}: {str(error)[:200]})\n"
            "  to fix:   install one version in all processes; keep other programs off their ports"
        ) from error
    return value


def _described(value: Any, elements: list[bytes]) -> Any:
    """Returns a value in JSON types, and appends the elements of its arrays to `elements`."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_described(each, elements) for each in value]
    if kind is tuple:
        return {"tuple": [_described(each, elements) for each in value]}
    if kind is dict and all(type(key) is str for key in value):
        return {"dict": {key: _described(each, elements) for key, each in value.items()}}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.name in _DTYPES:
        name = value.dtype.name
        elements.append(np.asarray(value, _DTYPES[name]).tobytes())  # in this machine's byte order
        return {"array": [name, list(value.shape)]}
    raise StrategyError(
        "a value cannot be sent to the other processes.\n"
        "  expected: None, bool, int, float, str, lists, tuples, dicts with str keys, NumPy arrays "
        "of numbers\n"
        f"  got:      {_type_name(value)}\n"
        "  to fix:   convert it to one of these"
    )


def _type_name(value: Any) -> str:
    if isinstance(value, (np.ndarray, np.generic)):
        return f"a NumPy array of dtype {value.dtype}"
    if type(value) is dict:
        return "a dict with keys that are not str"
    return f"{type(value).__module__}.{type(value).__qualname__}"


class _Reader:
    """Rebuilds a value from its JSON and the elements that begin at `offset`."""

    def __init__(self, message: bytes, offset: int) -> None:
        self._message, self.offset = message, offset

    def value(self, described: Any) -> Any:
        if isinstance(described, list):
            return [self.value(each) for each in described]
        if not isinstance(described, dict):
            return described
        ((kind, content),) = described.items()
        if kind == "tuple":
            return tuple([self.value(each) for each in content])
        if kind == "dict":
            return {key: self.value(each) for key, each in content.items()}
        if kind == "array":
            name, shape = content
            return self._array(_DTYPES[name], shape)
        raise ValueError(f"unknown kind {kind!r}")

    def _array(self, dtype: np.dtype[Any], shape: list[Any]) -> Any:
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"no shape: {shape}")
        count = math.prod(shape)
        # `frombuffer` checks that the message is long enough before anything is allocated.
        start, self.offset = self.offset, self.offset + count * dtype.itemsize
        if count == 0:
            return np.zeros(shape, dtype)
        return np.frombuffer(self._message, dtype, count, start).reshape(shape).copy()
