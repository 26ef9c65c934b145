"""A run that keeps checkpoints: what it has done before, and where it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from trainstep._trainer.checkpoints import Checkpoints, Position


class Run:
    """One `fit` with checkpoints.

    A run that goes on gets its state when the first batch is there: only then is everything built
    that has one. The batches that were run before are passed over.
    """

    def __init__(self, trainer: Any, checkpoints: Checkpoints) -> None:
        self._trainer, self._checkpoints = trainer, checkpoints
        found = checkpoints.found()
        self._position = Position() if found is None else found[0]
        self._restore = None if found is None else found[1]
        self._passed = self._position.step

    def remaining(self, epochs: range, runner: Any, feed: Any, group: int) -> range:
        """The epochs that are left, with the data where they begin."""
        if self._restore is None:
            start = np.random.get_state()
            self._position = replace(self._position, epoch=epochs.start, start=start)
            return epochs
        if self._position.epoch < epochs.start:  # a later one was asked for
            self._position, self._passed = replace(self._position, epoch=epochs.start, step=0), 0
        left = range(self._position.epoch, epochs.stop)
        if left:
            np.random.set_state(self._position.start)
            feed.skip_epochs(left.start - epochs.start)
            np.random.set_state(self._position.order)
        else:
            self._end(runner, feed, group)
        return left

    def _end(self, runner: Any, feed: Any, group: int) -> None:
        """Gives a run that has ended its state; a batch is needed to build what has one."""
        for size, batches, _ in feed.epoch(group):
            for batch in batches:
                self.passes(runner, batch, 0, size)
                np.random.set_state(self._position.order)
                return

    def begins(self, epoch: int) -> None:
        """An epoch begins; that of a run that goes on has begun before."""
        if self._restore is None:
            order = np.random.get_state()
            self._position = replace(self._position, epoch=epoch, step=0, order=order)

    def passes(self, runner: Any, batch: Any, step: int, size: int) -> bool:
        """Whether a batch was run before the run was stopped."""
        if self._restore is not None:
            runner.prepare(batch, size)
            self._restore(self._trainer)
            self._restore = None
        passed = step < self._passed
        if not passed:
            self._passed = 0
        return passed

    def stepped(self, step: int, size: int) -> None:
        """A call of so many steps is done."""
        total = self._position.total + size
        self._position = replace(self._position, step=step, total=total)
        self._checkpoints.stepped(self._trainer, self._position)

    def ended(self) -> None:
        """The epoch is done."""
        epoch, order = self._position.epoch + 1, np.random.get_state()
        self._position = replace(self._position, epoch=epoch, step=0, order=order)
        self._passed = 0
        self._checkpoints.ended(self._trainer, self._position)
