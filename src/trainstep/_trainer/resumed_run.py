"""Resumes a `fit` from its newest checkpoint, and tracks its position for the next one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from trainstep._trainer.checkpoints import Checkpoints, Position


class CheckpointedRun:
    """One `fit` with checkpoints.

    A resumed run restores its state when the first batch arrives: layers, slots and metrics have no
    variables before they are built. Batches that ran before the stop are skipped.
    """

    def __init__(self, trainer: Any, checkpoints: Checkpoints) -> None:
        self._trainer, self._checkpoints = trainer, checkpoints
        found = checkpoints.found()
        self._position = Position() if found is None else found[0]
        self._restore = None if found is None else found[1]
        self._skipped_steps = self._position.step

    def remaining_epochs(self, epochs: range, runner: Any, feed: Any, steps_per_call: int) -> range:
        """Returns the epochs that are left, and moves the data to the first of them."""
        if self._restore is None:
            start = np.random.get_state()
            self._position = replace(self._position, epoch=epochs.start, start=start)
            return epochs
        if self._position.epoch < epochs.start:  # `initial_epoch` is later than the checkpoint
            self._position = replace(self._position, epoch=epochs.start, step=0)
            self._skipped_steps = 0
        left = range(self._position.epoch, epochs.stop)
        if left:
            # A stream may draw from NumPy's generator while it is read, so it is read from the RNG
            # state of the start; the first epoch left then begins with the state of its own.
            np.random.set_state(self._position.start)
            feed.skip_epochs(left.start - epochs.start)
            np.random.set_state(self._position.order)
        else:
            self._restore_finished_run(runner, feed, steps_per_call)
        return left

    def _restore_finished_run(self, runner: Any, feed: Any, steps_per_call: int) -> None:
        """Restores the state of a run without epochs left; building it takes one batch."""
        for size, batches, _ in feed.epoch(steps_per_call):
            for batch in batches:
                self.should_skip(runner, batch, 0, size)
                np.random.set_state(self._position.order)
                return

    def begin_epoch(self, epoch: int) -> None:
        """Notes the begin of an epoch; the first one of a resumed run began before the stop."""
        if self._restore is None:
            order = np.random.get_state()
            self._position = replace(self._position, epoch=epoch, step=0, order=order)

    def should_skip(self, runner: Any, batch: Any, step: int, size: int) -> bool:
        """Whether a batch ran before the run was stopped; restores the state at the first batch."""
        if self._restore is not None:
            runner.prepare(batch, size)
            self._restore(self._trainer)
            self._restore = None
        skip = step < self._skipped_steps
        if not skip:
            self._skipped_steps = 0
        return skip

    def end_step(self, step: int, size: int) -> None:
        """Notes the end of a call of `size` steps."""
        total = self._position.total + size
        self._position = replace(self._position, step=step, total=total)
        self._checkpoints.stepped(self._trainer, self._position)

    def end_epoch(self) -> None:
        """Notes the end of the epoch, and saves."""
        epoch, order = self._position.epoch + 1, np.random.get_state()
        self._position = replace(self._position, epoch=epoch, step=0, order=order)
        self._skipped_steps = 0
        self._checkpoints.ended(self._trainer, self._position)
