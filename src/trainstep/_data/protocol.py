"""`Feed`, the interface between a source of batches and a training loop.

A `Feed` yields an epoch as a few `BatchGroup`s. A group is an iterable of single batches, or of
stacks of several batches that one call of the program runs. Long groups keep the inner loop tight:
the loop chooses its program once per group.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

Batch = tuple[Any, Any, Any]


class BatchGroup(NamedTuple):
    """Consecutive batches of an epoch that the same program runs.

    Attributes:
        steps_per_call: The number of batches stacked into each item of `batches`; 1 for no stack.
        batches: The batches, or stacks of them.
        length: The number of items, if they are all in memory; reading one early then has no side
            effect. 0 if the number is not known.
    """

    steps_per_call: int
    batches: Iterable[Batch]
    length: int = 0


class Feed(Protocol):
    """A source of batches."""

    steps: int | None  # batches in an epoch; None if not known

    def epoch(self, steps_per_call: int) -> Iterator[BatchGroup]:
        """Yields the batches of one epoch."""
        ...

    def restart(self) -> None:
        """Starts from the first batch again, where the source can."""
        ...

    def skip_epochs(self, epochs: int) -> None:
        """Skips epochs, so that the next one is the same as if they had been run."""
        ...


def iterate_batches(groups: Iterable[BatchGroup]) -> Iterator[Batch]:
    """Iterates over the batches of all groups."""
    return itertools.chain.from_iterable(group.batches for group in groups)
