"""One dtype per argument: that of the signature, or of the first call.

    x: float32 first  float64, float16, int64, uint8, bool, lists ... are cast to float32
    y: int32 first    int64, uint8, bool are cast to int32 if every value fits; floats are an error

A change of dtype thus needs no new program. A lossy cast is an `ArgumentError`. Python numbers
never raise: an int is cast to a float after floats, and a float after ints has its own program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from trainstep._common.errors import ArgumentError
from trainstep._explain.signature import Part, array_text
from trainstep._function.arguments import Arguments, Key

Entry = Any  # part of a key: the dtype of an array, or type and dtype of a Python number
_AS_IS: list[Entry] = []
_NARROW = ("float16", "bfloat16")


class Dtypes:
    """The dtypes of one function's arguments.

    Args:
        function: The name of the function, for messages.
        arguments: Flattens calls.
        names: The names of the parameters.
        declared: The dtypes of the signature, by the name of the array.
    """

    def __init__(
        self, function: str, arguments: Arguments, names: Sequence[str], declared: Mapping[str, str]
    ) -> None:
        self._function, self._arguments, self._names = function, arguments, names
        canonical = arguments.engine.canonical
        self._fixed: dict[str, Entry] = {n: canonical(dtype) for n, dtype in declared.items()}
        self._plans: dict[tuple[Any, ...], list[Entry]] = {}  # casts, by the first part of a key

    def conform(self, key: Key, leaves: list[Any], values: Sequence[Any]) -> tuple[Key, list[Any]]:
        """Casts a call to the fixed dtypes."""
        plan = self._plans.get(key[0])
        if plan is None:
            plan = self._plans[key[0]] = self._plan(key, values)
        if plan is _AS_IS:
            return key, leaves
        entries = iter(plan)
        skeleton: list[Any] = []
        made: list[Any] = []
        for entry in key[0]:
            if not _is_leaf(entry):
                skeleton.append(entry)
                continue
            wanted, leaf = next(entries), leaves[len(made)]
            if _dtype(wanted) != _dtype(entry):
                made_of = cast(leaf, _dtype(wanted))
                if made_of is None and not isinstance(entry, str):
                    wanted, made_of = entry, leaf  # such a number has a program of its own
                    self._check_engine(self._labels(values)[len(made)], entry)
                if made_of is None:
                    raise self._lossy(len(made), wanted, entry, leaf, values)
                leaf = made_of
            skeleton.append(wanted)
            made.append(leaf)
        return (tuple(skeleton), key[1]), made

    def parts(self, key: Key, parts: Iterable[Part]) -> list[Part]:
        """Returns the parts of a call with the dtypes of its key."""
        entries = (entry for entry in key[0] if _is_leaf(entry))
        shapes = iter(key[1])
        found = []
        for part in parts:
            if part.kind not in ("array", "number"):
                found.append(part)
                continue
            entry, shape = next(entries), tuple(next(shapes))
            if isinstance(entry, str):
                text = array_text(shape, entry)
                found.append(Part(part.label, text, "array", (shape, entry)))
            else:
                found.append(Part(part.label, entry[0].__name__, "number", entry))
        return found

    def fix(self, key: Key, parts: Iterable[Part]) -> None:
        """Fixes the dtypes of a call that has just got a program, where none is fixed yet."""
        labels = [part.label for part in parts if part.kind in ("array", "number")]
        entries = [entry for entry in key[0] if _is_leaf(entry)]
        new = {n: e for n, e in zip(labels, entries, strict=True) if n not in self._fixed}
        if new:
            self._fixed |= new
            self._plans.clear()

    def _labels(self, values: Sequence[Any]) -> list[str]:
        parts = self._arguments.parts(self._function, self._names, values)
        return [part.label for part in parts if part.kind in ("array", "number")]

    def _plan(self, key: Key, values: Sequence[Any]) -> list[Entry]:
        """Returns the dtype that each array and number of such calls is cast to."""
        entries = [entry for entry in key[0] if _is_leaf(entry)]
        labels = self._labels(values)
        plan = [_wanted(self._fixed.get(n, e), e) for n, e in zip(labels, entries, strict=True)]
        for label, entry in zip(labels, plan, strict=True):
            self._check_engine(label, entry)
        return _AS_IS if plan == entries else plan

    def _check_engine(self, label: str, entry: Entry) -> None:
        dtype = _dtype(entry)
        if self._arguments.engine.canonical(dtype) != dtype:
            raise ArgumentError(
                self._function,
                label,
                "an integer of at most 32 bits: the engine has no larger ones",
                "a larger one",
                "pass a float, or an array of smaller integers",
            )

    def _lossy(
        self, index: int, wanted: Entry, entry: Entry, leaf: Any, values: Sequence[Any]
    ) -> ArgumentError:
        dtype, shape = _dtype(wanted), tuple(np.shape(leaf))
        got = f"{array_text(shape, _dtype(entry))}, which {dtype} cannot represent without loss"
        cure = (
            f"convert it to {dtype} before the call; or use {_dtype(entry)} in the first call "
            "or in a Spec of `signature`"
        )
        expected = f"{dtype}, as in the signature or the first call"
        name = self._labels(values)[index]
        return ArgumentError(self._function, name, expected, got, cure)


def _is_leaf(entry: Any) -> bool:
    return type(entry) is str or (
        type(entry) is tuple and len(entry) == 2 and (entry[0] is int or entry[0] is float)
    )


def _dtype(entry: Entry) -> str:
    return entry if type(entry) is str else entry[1]


def _wanted(fixed: Entry, entry: Entry) -> Entry:
    """Returns the dtype to cast to, given the fixed one."""
    if type(entry) is not str and _is_float(_dtype(entry)) and not _is_float(_dtype(fixed)):
        return entry  # a Python float after ints: no cast, but another program
    return fixed


def _is_float(dtype: str) -> bool:
    return bool(keras.backend.is_float_dtype(dtype))


def cast(x: Any, dtype: str) -> Any:
    """Casts an array; returns None if that would lose information.

    Rounding float64 to float32 counts as no loss, as in Keras.
    """
    array = np.asarray(ops.convert_to_numpy(x))
    if array.dtype.name == "bfloat16":
        array = array.astype("float32")  # NumPy cannot compare bfloat16
    kind = array.dtype.kind
    if not _may_become(kind, dtype):
        return None
    if dtype == "bfloat16":  # cast by the engine: NumPy has no bfloat16
        tensor = ops.cast(ops.convert_to_tensor(array), dtype)
        made = np.asarray(ops.convert_to_numpy(ops.cast(tensor, "float32")))
    else:
        with np.errstate(over="ignore"):
            tensor = made = array.astype(dtype)
    if array.dtype.name == "float64" and dtype == "float32":
        return made
    # Integers are compared as cast: a cast back would turn 128 as int8 (-128) into uint8 128 again.
    back = made.astype(array.dtype) if made.dtype.kind not in "iu" else made
    return tensor if np.array_equal(back, array, equal_nan=kind in "fc") else None


def _may_become(kind: str, dtype: str) -> bool:
    """Whether an array of a NumPy kind may be cast to a dtype at all: floats not to integers."""
    if _is_float(dtype):
        return kind in "fiub"
    if dtype.startswith("complex"):
        return kind in "fiubc"
    return kind in "iub" and dtype != "bool"
