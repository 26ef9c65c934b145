"""How a tensor of a recorded step is cut, where each device computes its own rows of the batch.

A step is recorded for the whole batch: forward, backward and optimizer, as plain operations. Each
value is whole, or cut along the axis of the rows. torch and TensorFlow, whose records are
partitioned operation by operation, share this file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np


class Cut(NamedTuple):
    """A cut along an axis that holds the rows, with `unit` consecutive elements for each row."""

    axis: int
    unit: int = 1

    def without(self, gone: Sequence[int], *, keep: bool = False) -> Cut:
        """Returns the cut after other axes were removed; `keep`: they stay, with size 1."""
        return self if keep else self._replace(axis=self.axis - sum(d < self.axis for d in gone))


def reshaped(shape: Sequence[int], cut: Cut, new: Sequence[int], rows: int) -> Cut | None:
    """Returns the cut after a reshape; None if the elements of a row do not stay together."""
    before = math.prod(shape[: cut.axis])
    for axis, size in enumerate(new):
        if math.prod(new[:axis]) == before and size % rows == 0 and size:
            return Cut(axis, size // rows)
    return None


def with_own_rows(
    shape: tuple[int, ...],
    axis: int,
    start: int,
    stop: int,
    read: Callable[[tuple[slice, ...]], Any],
) -> Any:
    """Returns an array of a batch with only the rows of this process read; others are zero."""
    part = (*(slice(None),) * axis, slice(start, stop))
    part = (*part, *(slice(None),) * (len(shape) - len(part)))
    own = read(part)
    whole = np.zeros(shape, own.dtype)  # the system commits no memory for pages that stay zero
    whole[part] = own
    return whole


def batch_of(
    arrays: Sequence[Any], axes: Sequence[Sequence[str | None]] | None
) -> tuple[list[bool], int, str | None]:
    """Returns which arrays hold rows of the batch, the row count, and its name.

    Args:
        arrays: The arguments of a step.
        axes: The names of the dynamic sizes, see `Engine.trace`; None if there are none.
    """
    count = next((x.shape[0] for x in arrays if x.ndim), 0)
    if axes is None:
        return [bool(x.ndim and count and x.shape[0] == count) for x in arrays], count, None
    name = next((of[0] for of in axes if of), None)
    batch = [
        bool(of and of[0] == name and (name or (count and x.shape[0] == count)))
        for of, x in zip(axes, arrays, strict=True)
    ]
    return batch, count, name
