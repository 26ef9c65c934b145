"""Batches on their way to a loop: what a source of them is, and what it gives.

A `Feed` yields the batches of an epoch in stretches: an iterable of single batches, or of stacks of
several, to be run in one call of the program. Long stretches keep the loop over them tight.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

Batch = tuple[Any, Any, Any]


class Stretch(NamedTuple):
    """Batches of an epoch, one after the other.

    Attributes:
        group: How many batches each of them is: 1, or those of a stack.
        batches: The batches.
        length: How many there are, if they are in memory: to look at one ahead of its turn then
            does nothing. 0: not known.
    """

    group: int
    batches: Iterable[Batch]
    length: int = 0


class Feed(Protocol):
    """A source of batches."""

    steps: int | None  # in an epoch, if that is known

    def epoch(self, group: int) -> Iterator[Stretch]:
        """The batches of one epoch."""
        ...

    def restart(self) -> None:
        """Starts from the first batch again, where the source can."""
        ...

    def pass_over(self, epochs: int) -> None:
        """Leaves epochs out, where a later one depends on them."""
        ...


def all_of(stretches: Iterable[Stretch]) -> Iterator[Batch]:
    """What stretches have, one after the other."""
    return itertools.chain.from_iterable(stretch.batches for stretch in stretches)
