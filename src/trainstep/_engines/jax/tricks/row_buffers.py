"""Trick: copies rows into aligned memory that JAX uses without another copy.

    array --rows in any order--> our memory --split into batches--> inputs of a program

Only our own loops see this memory, and it is written to only when no view of it exists, including
JAX's references. So its batches need no copy on the way to a program, and shuffled data is copied
once, not twice.

It does not apply to arrays of Python objects, or to data that is not a NumPy array.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

import numpy as np

from trainstep._engines.jax.refcounts import expected_count, refcount
from trainstep._engines.shared.padding import aligned

_MAX_BLOCKS = 8  # blocks of memory to reuse; JAX queues several calls, each with its batch


class RowBuffer(bytearray):
    """Memory that is not modified while a view of it exists."""


class RowTaker:
    """Copies rows of an array, several at a time.

    Args:
        array: The array.
    """

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        self._blocks: deque[Any] = deque()
        self._unshared_count: Any = None  # references to a block without another owner

    def __call__(self, places: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns copies of the rows at these places."""
        if self._unshared_count is None:
            self._unshared_count = _unshared_count()
        rows: np.ndarray[Any, Any] = self._free(len(places))[: len(places)]
        self._array.take(places, 0, rows, "clip")  # "raise" would make `take` buffer its output
        return rows

    def _free(self, count: int) -> Any:
        """Returns memory for `count` rows that has no other owner."""
        if self._blocks:
            block = self._blocks.popleft()
            if len(block) >= count:
                self._blocks.append(block)
                if not refcount(block) > self._unshared_count:
                    return block
        block = aligned((count, *self._array.shape[1:]), self._array.dtype, RowBuffer)
        if len(self._blocks) < _MAX_BLOCKS:
            self._blocks.append(block)
        return block


@functools.cache
def _unshared_count() -> int | None:
    """Returns the reference count of a block without another owner in `RowTaker._free`."""
    taker = RowTaker(np.zeros((1, 1), np.uint8))

    def trial(alone: Any, is_shared: bool) -> bool:
        taker._blocks.clear()
        taker._unshared_count = alone
        given = taker._free(1)
        number, view = id(given), given[:1] if is_shared else None
        del given
        is_other = id(taker._free(1)) != number
        del view
        return is_other

    # By the deque, the name and the argument of `refcount`.
    return expected_count("a batch of shuffled rows", trial, most=3)


def works() -> bool:
    """Whether this Python tells when a block of memory has another owner."""
    return _unshared_count() is not None


def is_row_buffer(x: np.ndarray[Any, Any]) -> bool:
    """Whether an array is a view of a row buffer."""
    return type(getattr(x.base, "base", None)) is RowBuffer
