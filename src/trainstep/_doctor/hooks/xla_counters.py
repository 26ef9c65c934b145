"""TensorFlow's own counters of XLA's compilations, read where they lie.

TensorFlow counts every compilation and its time in C++, and has no function that tells. Its
counters are all in one registry, a map from names to counters, which is gone through here:

    registry -- map --> name, counter -- map --> the number

Where these lie is what the C++ headers of the installed version say, and may change with another.
So the way is tried on a counter of our own first, whose number is known. It is gone by reading
/proc/self/mem, where a wrong address is an error and not the end of the process.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

_DEFAULT = "_ZN3tsl10monitoring18CollectionRegistry7DefaultEv"
_NUMBER = "/tensorflow/core/xla_compilations"
_MICROSECONDS = "/tensorflow/core/xla_compilation_time_usecs"
_OURS, _KNOWN = "/trainstep/doctor/known", 0x5CA1AB1E
_WORD = 8
_ROOT = 4  # words from a registry, and from a counter, to the first node of its map
_CELL = 5  # words from that node of a counter to the number
_LABELS = 9  # words from the definition of a metric to its labels
_LONGEST = 256  # of the names
_MANY = 10_000  # more metrics than there are


class _Found(NamedTuple):
    """A metric: where it is; what kind it is; and whether it has one number only."""

    address: int
    kind: int
    single: bool


class Counter:
    """A number of TensorFlow's. It has a place from the first time on that it is counted."""

    def __init__(self, address: int) -> None:
        self._root = ctypes.c_size_t.from_address(address + _ROOT * _WORD)
        self._cell: ctypes.c_int64 | None = None

    def read(self) -> int:
        """The number as it is now."""
        if self._cell is None:
            if not self._root.value:
                return 0
            self._cell = ctypes.c_int64.from_address(self._root.value + _CELL * _WORD)
        return self._cell.value


def counters(monitoring: Any) -> tuple[Counter, Counter]:
    """Those of XLA's compilations, and of the microseconds that they took.

    Args:
        monitoring: TensorFlow's module of that name, which makes counters.

    Raises:
        OSError, LookupError, AttributeError: If they are not found, or not where they should be.
    """
    ours = monitoring.Counter(_OURS, "a number that is known")
    ours.get_cell().increase_by(_KNOWN)
    library = ctypes.CDLL(_library())
    default = library[_DEFAULT]
    default.restype = ctypes.c_size_t
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        known = dict(_metrics(memory, default()))
        like = known[_OURS]
        (root,) = _words(memory, like.address + _ROOT * _WORD, 1)
        if _words(memory, root + _CELL * _WORD, 1) != (_KNOWN,):
            raise LookupError("TensorFlow's counters lie elsewhere in this version")
    finally:
        os.close(memory)
    found = [known[name] for name in (_NUMBER, _MICROSECONDS)]
    if any(each.kind != like.kind or not each.single for each in found):
        raise LookupError("TensorFlow counts XLA's compilations otherwise in this version")
    number, microseconds = (Counter(each.address) for each in found)
    return number, microseconds


def _library() -> str:
    """The file of TensorFlow's that has the registry, as it is loaded."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip().partition("/")[2]
            if "libtensorflow_framework.so" in path:
                return f"/{path}"
    raise LookupError("libtensorflow_framework.so is not loaded")


def _metrics(memory: int, registry: int) -> Iterator[tuple[str, _Found]]:
    """The metrics of a registry, by their names."""
    waiting = list(_words(memory, registry + _ROOT * _WORD, 1))
    for _ in range(_MANY):  # in case that it is no tree
        if not waiting:
            return
        node = waiting.pop()
        _, _, left, right, length, name, definition, address = _words(memory, node, 8)
        waiting += filter(None, (left, right))
        text = os.pread(memory, min(length, _LONGEST), name).decode()
        (kind,) = _words(memory, definition, 1)
        first, end = _words(memory, definition + _LABELS * _WORD, 2)
        yield text, _Found(address, kind, first == end)


def _words(memory: int, address: int, number: int) -> tuple[int, ...]:
    read = os.pread(memory, number * _WORD, address)
    if len(read) < number * _WORD:
        raise OSError(f"nothing is at {address:#x}")
    return struct.unpack(f"{number}Q", read)
