"""How a tensor of a recorded step is cut, where each device computes its own rows of the batch.

A record is of the whole batch: forward, backward and optimizer, as plain operations. Each value is
whole, or cut along the axis that rows lie along. The two engines whose records are cut operation by
operation, torch and TensorFlow, share what is here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np


class Cut(NamedTuple):
    """An axis of a value that rows lie along, so many numbers for each."""

    axis: int
    unit: int = 1

    def without(self, gone: Sequence[int], *, keep: bool = False) -> Cut:
        """The cut after other axes went; `keep`: they stay, with size 1."""
        return self if keep else self._replace(axis=self.axis - sum(d < self.axis for d in gone))


def reshaped(shape: Sequence[int], cut: Cut, new: Sequence[int], rows: int) -> Cut | None:
    """How a value is cut after its axes were split or joined; None if rows do not stay together."""
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
    """An array of a batch, of which this process reads its own rows; the others are zero."""
    part = (*(slice(None),) * axis, slice(start, stop))
    part = (*part, *(slice(None),) * (len(shape) - len(part)))
    own = read(part)
    whole = np.zeros(shape, own.dtype)  # memory that is not touched is not taken
    whole[part] = own
    return whole


def batch_of(
    arrays: Sequence[Any], axes: Sequence[Sequence[str | None]] | None
) -> tuple[list[bool], int, str | None]:
    """Which arrays are rows of the batch, how many rows there are, and the name of that.

    Args:
        arrays: The arguments of a step.
        axes: The names of the sizes that vary, as of `Engine.trace`; None if none does.
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
