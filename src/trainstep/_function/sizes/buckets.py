"""Buckets: chooses the sizes to compile for, when to compile, and the bucket that serves a call.

The first size is on the grid, so that the most common one needs no padding. A size larger than all
compiled buckets gets the next bucket of the grid. Otherwise the smallest bucket that is large
enough serves, and the padding that a closer one would have saved is added up for that one. It is
compiled once this sum exceeds the cost of compiling, taken as `patience` steps of the mean size.
That cost is a constant, not a measured time, so that equal calls choose equal buckets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainstep._function.sizes.policy import Shapes

Bucket = tuple[int, ...]


class Account(NamedTuple):
    """The cost of a call with given sizes, in rows (positions, over all dynamic sizes)."""

    rows: int  # rows of the call
    padded: int  # rows that the program computes
    saved: int  # rows that the closest bucket would save
    wasted: list[int]  # the sum of these over all calls; one list per closest bucket


class Buckets:
    """The buckets of one recorded step.

    Attributes:
        compiled: The buckets that have a program, in the order of compilation.
        compiling: The bucket that is being compiled in the background, if any.
        rows: The rows of all calls so far.
        padded: The rows that were computed for them.
    """

    def __init__(self, names: Sequence[str], first: Mapping[str, int], shapes: Shapes) -> None:
        self._names, self._shapes = names, shapes
        self._first = [
            first[name] if shapes.grid_of(name) else max(first[name], shapes.multiple)
            for name in names
        ]
        self._limit = shapes.buckets * len(names)
        self._wasted: dict[Bucket, list[int]] = {}
        self._calls = 0
        self.rows, self.padded = 0, 0
        self.compiled: list[Bucket] = []
        self.compiling: Bucket | None = None

    def cell(self, sizes: Sequence[int]) -> Bucket:
        """Returns the smallest bucket of the grid that these sizes fit into."""
        return tuple(map(self._axis_cell, range(len(sizes)), sizes))

    def serving(self, sizes: Sequence[int]) -> Bucket | None:
        """Returns the smallest compiled bucket that these sizes fit into."""
        fitting = [b for b in self.compiled if all(map(int.__le__, sizes, b))]
        return min(fitting, key=math.prod, default=None)

    def needed(self, sizes: Sequence[int]) -> Bucket:
        """Returns the bucket to compile for sizes that fit into none."""
        # The first bucket also covers the first call.
        wanted = map(max, sizes, self._first) if not self.compiled else sizes
        return self.cell(list(wanted))

    def account(self, sizes: Sequence[int], serving: Bucket) -> Account:
        """Returns the cost of calls with these sizes in a bucket."""
        cell, padded = self.cell(sizes), math.prod(serving)
        wasted = self._wasted.setdefault(cell, [0])
        return Account(math.prod(sizes), padded, max(padded - math.prod(cell), 0), wasted)

    def note(self, account: Account) -> bool:
        """Counts a call; returns whether a closer bucket is now worth compiling."""
        self._calls += 1
        self.rows += account.rows
        self.padded += account.padded
        if not account.saved:
            return False
        account.wasted[0] += account.saved
        return (
            account.wasted[0] * self._calls > self._shapes.patience * self.rows
            and self.compiling is None
            and len(self.compiled) < self._limit
        )

    def is_full(self) -> bool:
        """Whether the number of buckets has reached its limit."""
        return len(self.compiled) >= self._limit

    def up_to(self, largest: Mapping[str, int]) -> list[Bucket]:
        """Returns every bucket of the grid up to the one for these sizes, the largest first."""
        found: list[Bucket] = [()]
        for axis, name in enumerate(self._names):
            cells = self._grid(axis, largest[name])
            top = next(place for place, cell in enumerate(cells) if cell >= largest[name])
            found = [(*bucket, cell) for bucket in found for cell in reversed(cells[: top + 1])]
        return found

    def _axis_cell(self, axis: int, size: int) -> int:
        return next(cell for cell in self._grid(axis, size) if cell >= size)

    def _grid(self, axis: int, size: int) -> list[int]:
        """Returns the bucket sizes of one axis, ascending, up to at least this size."""
        multiple, ratio = self._shapes.multiple, self._shapes.ratio_of(self._names[axis])
        given = self._shapes.grid_of(self._names[axis])
        grid = list(given) if given is not None else [self._first[axis]]
        while given is None:  # downward from the first size, by at least one multiple
            by_ratio = math.ceil(grid[0] / ratio / multiple) * multiple
            below = min(by_ratio, (grid[0] - multiple) // multiple * multiple)
            if below < multiple:
                break
            grid.insert(0, below)
        while grid[-1] < size:
            above = max(grid[-1] * ratio, grid[-1] + multiple)
            grid.append(math.ceil(above / multiple) * multiple)
        return grid
