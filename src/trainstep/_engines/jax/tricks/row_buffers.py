"""JAX: rows of arrays, fetched into memory that JAX takes as it is.

    array --rows from all over it--> memory of ours --cut into batches--> inputs of a program

Nobody but a loop of ours has seen such memory, and nobody writes to it until all that was cut from
it is gone, JAX's own references included. So its batches need no copy on their way to a program.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from trainstep._engines.jax.refcounts import QUEUED, refcount
from trainstep._engines.shared.padding import aligned

_KEPT = 8  # pieces of memory to be used again; JAX lets several calls wait, each with its batch


class Lent(bytearray):
    """Memory whose numbers stay as they are while anybody holds a part of it."""


class RowTaker:
    """Fetches rows of an array, some at a time.

    Args:
        array: The array.
    """

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        self._pieces: deque[Any] = deque()

    def __call__(self, places: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The rows at these places."""
        rows: np.ndarray[Any, Any] = self._free(len(places))[: len(places)]
        self._array.take(places, 0, rows, "clip")  # which has no need of a copy of its own
        return rows

    def _free(self, count: int) -> Any:
        """Memory for so many rows that nobody holds."""
        if self._pieces:
            piece = self._pieces.popleft()
            if len(piece) >= count:
                self._pieces.append(piece)
                if refcount(piece) == QUEUED:
                    return piece
        piece = aligned((count, *self._array.shape[1:]), self._array.dtype, Lent)
        if len(self._pieces) < _KEPT:
            self._pieces.append(piece)
        return piece


def is_lent(x: np.ndarray[Any, Any]) -> bool:
    """Whether an array is a part of rows that were fetched here."""
    return type(getattr(x.base, "base", None)) is Lent
