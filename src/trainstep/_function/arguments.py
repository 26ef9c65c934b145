"""Flattens the values of a call: into arrays, and into the cache key of its program.

Every value is of one of five kinds. Its type decides which, once per type:

    array      NumPy's, the engine's, a list of numbers, `__array__`: keyed by dtype and shape
    number     an int or float of Python or NumPy: a 0-d array; its value never retraces
    static     bool, str, bytes, None, enum, dtype: keyed by type and value (1, 1.0 and True differ)
    structure  tuple, list, dict, named tuple, dataclass: keyed by its parts
    object     everything else (a model, an optimizer, a function): keyed by identity, never stored

`flatten` runs at every call, so it does as little as possible. `parts` and `rebuild` traverse the
same values again, in the same order, and run only on a cache miss.
"""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from trainstep._common.errors import ArgumentError, ForeignTraceError
from trainstep._common.structure import is_number_list, is_record, like, ordered, structure
from trainstep._engines import Engine
from trainstep._explain.signature import Part, array_text

_PLAIN_VALUES = (bool, str, bytes, type(None), type(Ellipsis), range, frozenset)
_STATIC = (*_PLAIN_VALUES, enum.Enum, np.dtype, type, pathlib.PurePath)
_NUMBERS = (int, float)

Handler = Callable[[Any, list[Any], list[Any]], None]
# (structure, static values, objects and dtypes of a call; shapes of its arrays)
Key = tuple[tuple[Any, ...], tuple[tuple[int, ...], ...]]


_STRINGS = "SU"
_CURE = "convert it before the call"
_CURES = {
    "O": "convert it to one dtype: `np.asarray(x, 'float32')` raises where that is impossible",
    **dict.fromkeys(
        _STRINGS,
        "encode it before the call: classes with `np.unique(labels, return_inverse=True)[1]`, "
        "words with a `keras.layers.StringLookup`",
    ),
}


class Arguments:
    """Flattens the values of a call for one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._handlers: dict[type, Handler] = {
            np.ndarray: self._numpy,
            float: self._float,
            int: self._int,
            list: self._list,
            tuple: self._tuple,
            dict: self._dict,
            slice: self._slice,
            **dict.fromkeys((bool, str, type(None)), self._static),
        }
        self._canonical: dict[Any, tuple[str, bool]] = {}  # by NumPy dtype: name, is a cast needed
        self._names: dict[Any, str] = {}  # by dtype of the engine

    # Every call ---------------------------------------------------------------------------

    def flatten(self, values: Sequence[Any]) -> tuple[Key, list[Any]]:
        """Returns the key of the call, and its arrays in order."""
        key: list[Any] = []
        leaves: list[Any] = []
        handlers = self._handlers
        for value in values:
            kind = type(value)
            (handlers.get(kind) or self._learn(value, kind))(value, key, leaves)
        return (tuple(key), tuple(map(self.engine.shape, leaves))), leaves

    def _numpy(self, x: Any, key: list[Any], leaves: list[Any]) -> None:
        known = self._canonical.get(x.dtype)
        if known is None:
            known = self._canonical[x.dtype] = self._canonical_of(x)
        dtype, cast = known
        if cast:  # looked up again: the user may have changed Keras's `floatx`
            dtype, _ = self._canonical_of(x)
            made = x.astype(dtype)
            if x.dtype.kind in "iu" and (made != x).any():
                # Too large for the engine's integers: `Dtypes` casts it to a float, or raises.
                dtype, made = x.dtype.name, x
            x = made
        key.append(dtype)
        leaves.append(x)

    def _native(self, x: Any, key: list[Any], leaves: list[Any]) -> None:
        name = self._names.get(x.dtype)
        if name is None:
            name = self._names[x.dtype] = keras.backend.standardize_dtype(x.dtype)
        key.append(name)
        leaves.append(x)

    def _float(self, x: Any, key: list[Any], leaves: list[Any]) -> None:
        dtype = self.engine.canonical(keras.config.floatx())
        key.append((float, dtype))
        leaves.append(np.asarray(x, dtype))

    def _int(self, x: Any, key: list[Any], leaves: list[Any]) -> None:
        if -(2**31) <= x < 2**31:
            dtype = "int32"
        elif -(2**63) <= x < 2**63:
            dtype = "int64"  # `Dtypes` casts or raises if the engine has no int64
        else:
            raise ValueError("an integer of more than 64 bits, which no engine supports")
        key.append((int, dtype))
        leaves.append(np.asarray(x, dtype))

    def _static(self, x: Any, key: list[Any], leaves: list[Any]) -> None:
        key.append((type(x), x))

    def _slice(self, x: Any, key: list[Any], leaves: list[Any]) -> None:
        key.append((slice, x.start, x.stop, x.step))  # slices are not hashable before Python 3.12

    def _object(self, x: Any, key: list[Any], leaves: list[Any]) -> None:
        key.append((object, identity(x)))

    def _array_like(self, x: Any, key: list[Any], leaves: list[Any]) -> None:
        try:
            array = np.asarray(x)
        except Exception as error:
            text = f"a {type(x).__name__} that cannot be converted to an array: {error}"
            raise TypeError(text) from error
        self._numpy(array, key, leaves)

    def _many(self, kind: Any, items: Any, key: list[Any], leaves: list[Any]) -> None:
        key.append(kind)
        handlers = self._handlers
        for item in items:
            (handlers.get(type(item)) or self._learn(item, type(item)))(item, key, leaves)

    def _list(self, x: Any, key: list[Any], leaves: list[Any]) -> None:
        if is_number_list(x):
            self._numpy(np.asarray(x), key, leaves)
        else:
            self._many((list, len(x)), x, key, leaves)

    def _tuple(self, x: Any, key: list[Any], leaves: list[Any]) -> None:
        self._many((type(x), len(x)), x, key, leaves)

    def _dict(self, x: Any, key: list[Any], leaves: list[Any]) -> None:
        names = ordered(x)
        self._many((type(x), *names), [x[name] for name in names], key, leaves)

    def _dataclass(self, x: Any, key: list[Any], leaves: list[Any]) -> None:
        self._many(type(x), [getattr(x, f.name) for f in dataclasses.fields(x)], key, leaves)

    def _learn(self, x: Any, kind: type) -> Handler:
        """Chooses the handler of a type, once."""
        handler = self._handler_for(x)
        self._handlers[kind] = handler
        return handler

    def _handler_for(self, x: Any) -> Handler:
        if self.engine.is_array(x):
            return self._native
        if self.engine.is_tensor(x) and not isinstance(x, (np.ndarray, np.generic)):
            if not self.engine.is_idle():  # a tracer of another trace
                raise ForeignTraceError("a function", self.engine.name)
            raise TypeError(f"a {type(x).__name__}, which cannot be an argument of a step")
        if isinstance(x, keras.KerasTensor):
            raise TypeError("a symbolic KerasTensor, which has no values")
        if isinstance(x, keras.Variable):
            return self._object
        for family, handler in (
            (_STATIC, self._static),
            (np.floating, self._float),
            (np.integer, self._int),
            ((np.ndarray, np.generic), self._array_like),
            (tuple, self._tuple),
            (list, self._list),
            (dict, self._dict),
        ):
            if isinstance(x, family):
                return handler
        if is_record(x):
            return self._dataclass
        if isinstance(x, complex):
            return self._array_like
        if isinstance(x, _NUMBERS):
            return self._float if isinstance(x, float) else self._int
        return self._array_like if hasattr(x, "__array__") else self._object

    def _canonical_of(self, x: Any) -> tuple[str, bool]:
        """Returns the dtype that the engine sees, and whether the array has to be cast to it.

        A float64 array becomes Keras's `floatx`, as in `keras.Model.fit`, so that calls with
        NumPy's default dtype share the program of the others.
        """
        name = x.dtype.name
        if x.dtype.kind not in "biufc" and name not in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            what = "of strings" if x.dtype.kind in _STRINGS else f"of dtype {name}"
            raise TypeError(f"an array {what}, which no engine supports")
        dtype = self.engine.canonical(keras.config.floatx() if name == "float64" else name)
        return dtype, dtype != name or not x.dtype.isnative

    # On a cache miss only -----------------------------------------------------------------

    def parts(self, function: str, names: Sequence[str], values: Sequence[Any]) -> Iterator[Part]:
        """Yields the named parts of the call, for the signature."""
        for name, value in zip(names, values, strict=True):
            yield from self._parts(function, name, value)

    def _parts(self, function: str, name: str, value: Any) -> Iterator[Part]:
        key: list[Any] = []
        leaves: list[Any] = []
        children = structure(value)
        if children is not None:
            kind = type(value).__name__
            text = f"{kind} of {len(children)}"
            yield Part(
                f"{name} (structure)", text, "structure", (kind, tuple(n for n, _ in children))
            )
            for suffix, child in children:
                yield from self._parts(function, f"{name}{suffix}", child)
            return
        try:
            (self._handlers.get(type(value)) or self._learn(value, type(value)))(value, key, leaves)
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                function,
                name,
                "an array, a number, a static value or an object",
                str(error),
                _CURES.get(getattr(getattr(value, "dtype", None), "kind", ""), _CURE),
            ) from error
        if isinstance(key[0], tuple) and key[0][:1] == (object,):
            yield Part(name, object_text(value), "object", key[0])
        elif not leaves:
            yield Part(name, repr(value), "static", key[0])
        elif isinstance(key[0], tuple) and key[0][:1] in ((int,), (float,)):
            yield Part(name, type(value).__name__, "number", key[0])
        else:
            shape = tuple(self.engine.shape(leaves[0]))
            yield Part(name, array_text(shape, key[0]), "array", (shape, key[0]))

    def is_plain(self, value: Any) -> bool:
        """Whether a value is an array that needs no cast."""
        if type(value) is np.ndarray:
            return not self._canonical.get(value.dtype, ("", True))[1]
        return self.engine.is_array(value)

    def is_object(self, value: Any) -> bool:
        """Whether a value is keyed by its own id. A bound method is not: each access makes one."""
        known = self._handlers.get(type(value)) == self._object
        return known and not isinstance(value, types.MethodType)

    def objects(self, values: Sequence[Any]) -> list[Any]:
        """Returns the objects of a call, which its program is compiled for."""
        found: list[Any] = []
        for value in values:
            children = structure(value)
            if children is not None:
                found += self.objects([child for _, child in children])
            elif self._handlers.get(type(value)) == self._object:
                found.append(value)
        return found

    def rebuild(self, values: Sequence[Any], tensors: Iterator[Any]) -> list[Any]:
        """Returns the values of the call with each array replaced by the next tensor."""
        return [self._rebuild(value, tensors) for value in values]

    def _rebuild(self, value: Any, tensors: Iterator[Any]) -> Any:
        children = structure(value)
        if children is not None:
            return like(value, [self._rebuild(child, tensors) for _, child in children])
        leaves: list[Any] = []
        self._handlers[type(value)](value, [], leaves)
        return next(tensors) if leaves else value


def identity(x: Any) -> Any:
    """Returns the key of an object. A bound method is a new object at each access."""
    if hasattr(x, "__func__") and hasattr(x, "__self__"):
        return (id(x.__self__), id(x.__func__))
    return id(x)


def object_text(x: Any) -> str:
    """`Sequential 'a'`, or the name of a function."""
    if isinstance(x, types.MethodType):
        return f"method {x.__qualname__} of {object_text(x.__self__)}"
    name = getattr(x, "name", None) or getattr(x, "__qualname__", None)
    kind = type(x).__name__
    return f"{kind} {name!r}" if isinstance(name, str) else kind
