"""Which sizes to compile for, when, and which of them serves a call.

The rule: the first size seen stands on the grid, so that the commonest one wastes nothing. A size
with no bucket above it gets the next one of the grid. Otherwise the smallest bucket above serves,
and what a closer one would have saved is put to the account of that; when the account passes the
price of compiling, which is taken as `patience` steps of the mean size, it is compiled. The price
is a constant and not a measured time, so that the same calls choose the same buckets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainstep._function.sizes.policy import Shapes

Bucket = tuple[int, ...]


class Account(NamedTuple):
    """What a call of some sizes costs."""

    rows: int  # that it has
    padded: int  # that the program computes
    saved: int  # that the closest bucket would save
    owed: list[int]  # what it would have saved so far, over all calls in it


class Buckets:
    """The buckets of one recorded step.

    Attributes:
        compiled: The buckets that have a program, in the order of compilation.
        awaited: The one that is being compiled.
        rows: What came so far: positions, over all sizes that vary.
        padded: What was computed for it.
    """

    def __init__(self, names: Sequence[str], first: Mapping[str, int], shapes: Shapes) -> None:
        self._names, self._shapes = names, shapes
        self._first = [
            first[name] if shapes.grid_of(name) else max(first[name], shapes.multiple)
            for name in names
        ]
        self._limit = shapes.buckets * len(names)
        self._owed: dict[Bucket, list[int]] = {}
        self._calls = 0
        self.rows, self.padded = 0, 0
        self.compiled: list[Bucket] = []
        self.awaited: Bucket | None = None

    def cell(self, sizes: Sequence[int]) -> Bucket:
        """The bucket of the grid that is closest to these sizes."""
        return tuple(map(self._axis_cell, range(len(sizes)), sizes))

    def serving(self, sizes: Sequence[int]) -> Bucket | None:
        """The smallest compiled bucket that these sizes fit into."""
        fitting = [b for b in self.compiled if all(map(int.__le__, sizes, b))]
        return min(fitting, key=math.prod, default=None)

    def needed(self, sizes: Sequence[int]) -> Bucket:
        """What to compile for sizes that fit into none: at least as large as what came first."""
        wanted = map(max, sizes, self._first) if not self.compiled else sizes
        return self.cell(list(wanted))

    def account(self, sizes: Sequence[int], serving: Bucket) -> Account:
        """What calls of these sizes are put down to."""
        cell, padded = self.cell(sizes), math.prod(serving)
        owed = self._owed.setdefault(cell, [0])
        return Account(math.prod(sizes), padded, max(padded - math.prod(cell), 0), owed)

    def note(self, account: Account) -> bool:
        """Notes a call; says whether a closer bucket has become worth its price."""
        self._calls += 1
        self.rows += account.rows
        self.padded += account.padded
        if not account.saved:
            return False
        account.owed[0] += account.saved
        return (
            account.owed[0] * self._calls > self._shapes.patience * self.rows
            and self.awaited is None
            and len(self.compiled) < self._limit
        )

    def full(self) -> bool:
        """Whether there are as many buckets as there may be."""
        return len(self.compiled) >= self._limit

    def up_to(self, largest: Mapping[str, int]) -> list[Bucket]:
        """Every bucket of the grid up to the one for these sizes, the largest first."""
        found: list[Bucket] = [()]
        for axis, name in enumerate(self._names):
            cells = self._grid(axis, largest[name])
            top = next(place for place, cell in enumerate(cells) if cell >= largest[name])
            found = [(*bucket, cell) for bucket in found for cell in reversed(cells[: top + 1])]
        return found

    def _axis_cell(self, axis: int, size: int) -> int:
        return next(cell for cell in self._grid(axis, size) if cell >= size)

    def _grid(self, axis: int, size: int) -> list[int]:
        """The sizes of buckets along one axis, ascending, far enough for this size."""
        multiple, ratio = self._shapes.multiple, self._shapes.ratio_of(self._names[axis])
        given = self._shapes.grid_of(self._names[axis])
        grid = list(given) if given is not None else [self._first[axis]]
        while given is None:  # down from the first size: at least one multiple each time
            by_ratio = math.ceil(grid[0] / ratio / multiple) * multiple
            below = min(by_ratio, (grid[0] - multiple) // multiple * multiple)
            if below < multiple:
                break
            grid.insert(0, below)
        while grid[-1] < size:
            above = max(grid[-1] * ratio, grid[-1] + multiple)
            grid.append(math.ceil(above / multiple) * multiple)
        return grid
