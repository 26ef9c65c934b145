"""One dtype per argument: that of the signature, or that of the first call.

    x: float32 at first  float64, float16, int64, uint8, bool, lists ... are made float32
    y: int32 at first    int64, uint8, bool are made int32 if every value fits; floats are an error

A change of dtype is thus no new program; one that would lose something is an `ArgumentError`, not a
cast. Python's numbers are never an error: an int enters the program of a float, and a float where
ints came first has a program of its own.
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

Entry = Any  # of a key: the dtype of an array, or the type and dtype of a Python number
_AS_IS: list[Entry] = []
_NARROW = ("float16", "bfloat16")


class Dtypes:
    """The dtypes of one function's arguments.

    Args:
        function: Its name, for messages.
        arguments: Takes calls apart.
        names: Of the parameters.
        declared: The dtypes that the signature declares, by the name of the array.
    """

    def __init__(
        self, function: str, arguments: Arguments, names: Sequence[str], declared: Mapping[str, str]
    ) -> None:
        self._function, self._arguments, self._names = function, arguments, names
        canonical = arguments.engine.canonical
        self._fixed: dict[str, Entry] = {n: canonical(dtype) for n, dtype in declared.items()}
        self._plans: dict[tuple[Any, ...], list[Entry]] = {}  # by what calls are

    def conform(self, key: Key, leaves: list[Any], values: Sequence[Any]) -> tuple[Key, list[Any]]:
        """The call in the dtypes that are fixed."""
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
                    wanted, made_of = entry, leaf  # a number that does not fit has its own program
                    self._check_engine(self._labels(values)[len(made)], entry)
                if made_of is None:
                    raise self._lossy(len(made), wanted, entry, leaf, values)
                leaf = made_of
            skeleton.append(wanted)
            made.append(leaf)
        return (tuple(skeleton), key[1]), made

    def parts(self, key: Key, parts: Iterable[Part]) -> list[Part]:
        """The parts of a call in the dtypes that it has in its key."""
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
        """Fixes what a call that has a program now was first to say."""
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
        """What each array and number of such calls is made."""
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
                "an integer of 32 bits, which is what the engine has",
                "one beyond that",
                "pass a float, or an array of smaller integers",
            )

    def _lossy(
        self, index: int, wanted: Entry, entry: Entry, leaf: Any, values: Sequence[Any]
    ) -> ArgumentError:
        dtype, shape = _dtype(wanted), tuple(np.shape(leaf))
        came = f"{array_text(shape, _dtype(entry))}, which {dtype} cannot hold without loss"
        cure = (
            f"convert it to {dtype} before the call; or let the first call, or a Spec in "
            f"`signature`, be {_dtype(entry)}"
        )
        expected = f"{dtype}, as in the signature or the first call"
        name = self._labels(values)[index]
        return ArgumentError(self._function, name, expected, came, cure)


def _is_leaf(entry: Any) -> bool:
    return type(entry) is str or (
        type(entry) is tuple and len(entry) == 2 and (entry[0] is int or entry[0] is float)
    )


def _dtype(entry: Entry) -> str:
    return entry if type(entry) is str else entry[1]


def _wanted(fixed: Entry, entry: Entry) -> Entry:
    """What an array or number is made, given what was fixed for its place."""
    if type(entry) is not str and _is_float(_dtype(entry)) and not _is_float(_dtype(fixed)):
        return entry  # a Python float where ints came first
    return fixed


def _is_float(dtype: str) -> bool:
    return bool(keras.backend.is_float_dtype(dtype))


def cast(x: Any, dtype: str) -> Any:
    """An array in another dtype; None if that would lose something.

    From float64 to float32 is no loss here, as it is none to Keras.
    """
    array = np.asarray(ops.convert_to_numpy(x))
    if array.dtype.name == "bfloat16":
        array = array.astype("float32")  # which NumPy knows how to compare
    kind = array.dtype.kind
    if not _may_become(kind, dtype):
        return None
    if dtype == "bfloat16":  # an array of the engine: NumPy has none
        tensor = ops.cast(ops.convert_to_tensor(array), dtype)
        made = np.asarray(ops.convert_to_numpy(ops.cast(tensor, "float32")))
    else:
        with np.errstate(over="ignore"):
            tensor = made = array.astype(dtype)
    if array.dtype.name == "float64" and dtype == "float32":
        return made
    # As integers the two are compared as they are: -128 and 128 have the same bits.
    back = made.astype(array.dtype) if made.dtype.kind not in "iu" else made
    return tensor if np.array_equal(back, array, equal_nan=kind in "fc") else None


def _may_become(kind: str, dtype: str) -> bool:
    """Whether an array of a NumPy kind can be of a dtype at all: floats are no integers."""
    if _is_float(dtype):
        return kind in "fiub"
    if dtype.startswith("complex"):
        return kind in "fiubc"
    return kind in "iub" and dtype != "bool"
