"""Whole data sets: `fit`, `evaluate` and `predict` of a trainer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from trainstep._common.errors import ProcessLostError
from trainstep._data.batch_checks import check_positive, class_weight_table, unpack_batch
from trainstep._data.feed import feed, split_batch, split_validation
from trainstep._data.per_process import per_process_feed
from trainstep._data.protocol import Feed
from trainstep._distribution.processes import job
from trainstep._trainer import loop
from trainstep._trainer.callbacks import Callbacks
from trainstep._trainer.checkpoints import Checkpoints
from trainstep._trainer.compiled_steps import Functions, StepRunner
from trainstep._trainer.progress import Progress, shown
from trainstep._trainer.recipe import Recipe
from trainstep._trainer.resumed_run import Run


class Fitting:
    """The part of a trainer that goes over data sets.

    Attributes:
        model: The model.
    """

    model: Any
    _functions: Functions
    _recipe: Recipe
    _layout: Any
    _running = False  # in `fit` or `evaluate`, whose metrics run on over the batches

    def fit(
        self,
        x: Any,
        y: Any = None,
        *,
        epochs: int = 1,
        batch_size: int | None = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        validation_data: Any = None,
        validation_split: float = 0.0,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
        shuffle: bool = True,
        callbacks: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        steps_per_call: int = 1,
        checkpoints: Checkpoints | None = None,
        progress: bool | str = True,
    ) -> Any:
        """Trains for some epochs, as `keras.Model.fit` does.

        Args:
            x: Arrays, `(x, y)` or `(x, y, sample_weight)` of arrays, or a source of batches: a
                `tf.data.Dataset`, a torch `DataLoader`, a `keras.utils.PyDataset`, a generator, an
                iterator, or a function that returns one for each epoch.
            y: The targets, if `x` is arrays.
            epochs: The number of the epoch to stop before.
            batch_size: For arrays; 32 by default.
            sample_weight: A weight per sample, if `x` is arrays.
            class_weight: A weight per class, by its number.
            validation_data: Anything that `x` may be; evaluated after an epoch.
            validation_split: The last part of the arrays to validate with instead.
            validation_steps: Batches in a validation; all by default.
            validation_batch_size: `batch_size` by default.
            validation_freq: Validate after every so many epochs, or after those named.
            shuffle: Whether arrays get a new order in each epoch, drawn from NumPy's generator.
            callbacks: Keras callbacks.
            initial_epoch: The number of the first epoch.
            steps_per_epoch: Batches in an epoch; all by default.
            steps_per_call: Steps that one call of the program runs. The numbers are the same;
                callbacks hear of each batch after the call that it was in.
            checkpoints: Saves the state, and goes on from the newest; see `Checkpoints`.
            progress: True for a bar, `"lines"` for a line per epoch, False for nothing.

        Returns:
            A Keras `History`.
        """
        check_positive("Trainer.fit", steps_per_call=steps_per_call)
        epochs = min(epochs, keras.config.max_epochs() or epochs)
        x, y, sample_weight = split_batch(x, y, sample_weight)
        classes = class_weight_table(class_weight, sample_weight)
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = split_validation(
                (x, y, sample_weight), validation_split
            )
        steps = _least(steps_per_epoch, keras.config.max_steps_per_epoch())
        source = self._feed(
            x, y, sample_weight, batch_size=batch_size, steps=steps, shuffle=shuffle
        )
        self._recipe.adopt()
        with self._bar(progress, epochs) as bar, self._metrics_running(True):
            params = _params(epochs, source, progress)
            called = Callbacks(callbacks, self.model, history=True, **params)
            fit = functools.partial(
                loop.fit,
                self,
                StepRunner(self._functions, "train", classes),
                source,
                epochs=range(initial_epoch, epochs),
                group=steps_per_call,
                callbacks=called,
                progress=bar,
                validate=self._validation(
                    validation_data, validation_batch_size or batch_size, validation_steps, called
                ),
                validate_at=lambda epoch: _due(epoch, validation_freq),
            )
            self._keeping(checkpoints, fit, trains=epochs > initial_epoch)
        return self.model.history

    def _keeping(self, checkpoints: Checkpoints | None, fit: Any, *, trains: bool) -> None:
        """Runs a fit, with checkpoints if there are any."""
        optimizer = self._recipe.optimizer
        try:
            if checkpoints is None:
                fit()
            else:
                with checkpoints.running():
                    fit(run_of=Run(self, checkpoints))
        finally:
            if trains and optimizer.built:
                optimizer.finalize_variable_values(self.model.trainable_weights)

    def _validation(
        self, data: Any, batch_size: int | None, steps: int | None, callbacks: Callbacks
    ) -> Callable[[], dict[str, Any]] | None:
        if data is None:
            return None
        batch = unpack_batch(data) if isinstance(data, (list, tuple)) else (data, None, None)
        source = self._feed(*batch, batch_size=batch_size, steps=steps)
        runner, silent = StepRunner(self._functions, "test"), Progress(self.model)

        def validate() -> dict[str, Any]:
            source.restart()
            return loop.evaluate(self, runner, source, callbacks, silent)

        return validate

    def evaluate(
        self,
        x: Any,
        y: Any = None,
        *,
        batch_size: int | None = None,
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        progress: bool | str = False,
    ) -> dict[str, Any]:
        """The loss and metrics over a data set; the arguments are those of `fit`."""
        source = self._feed(*split_batch(x, y, sample_weight), batch_size=batch_size, steps=steps)
        params = _params(1, source, progress)
        self._recipe.adopt()
        with self._bar(progress, 1) as bar, self._metrics_running(True):
            called = Callbacks(callbacks, self.model, history=False, **params)
            bar.start_epoch(0, source.steps)
            logs = loop.evaluate(self, StepRunner(self._functions, "test"), source, called, bar)
            bar.end_epoch(logs)
        return logs

    def predict(
        self,
        x: Any,
        *,
        batch_size: int | None = None,
        steps: int | None = None,
        callbacks: Any = None,
        progress: bool | str = False,
    ) -> Any:
        """The outputs over a data set, as NumPy arrays; the arguments are those of `fit`."""
        source = self._feed(x, batch_size=batch_size, steps=steps)
        params = _params(1, source, progress)
        self._recipe.adopt()
        with self._bar(progress, 1) as bar:
            called = Callbacks(callbacks, self.model, history=False, **params)
            outputs = loop.predict(self._functions.step("predict"), source, called, bar)
        return tree.map_structure(
            lambda *parts: np.concatenate([ops.convert_to_numpy(part) for part in parts]), *outputs
        )

    def _feed(self, *data: Any, **how: Any) -> Feed:
        return per_process_feed(feed(*data, **how), self._layout)

    def _bar(self, progress: bool | str, epochs: int) -> Progress:
        shows = progress if job().is_first else False
        return shown(shows, self.model, epochs, self._functions.retraces)

    @contextlib.contextmanager
    def _metrics_running(self, running: bool) -> Iterator[None]:
        """Lets metrics run on over the batches for a while, or start anew at each."""
        before = self._running
        if before is running:
            yield
            return
        self._running = running
        self._recipe.set_fresh(not running)
        is_lost = False
        try:
            yield
        except ProcessLostError:
            is_lost = (
                True  # writing a variable of many processes would wait for the one that is gone
            )
            raise
        finally:
            if not is_lost:
                self._running = before
                self._recipe.set_fresh(not before)


def _params(epochs: int, source: Feed, progress: bool | str) -> dict[str, Any]:
    """What callbacks are told of a run."""
    return {"epochs": epochs, "steps": source.steps, "verbose": int(bool(progress))}


def _least(*numbers: int | None) -> int | None:
    return min((number for number in numbers if number), default=None)


def _due(epoch: int, freq: int | Sequence[int]) -> bool:
    """Whether this epoch is followed by a validation."""
    return (epoch + 1) % freq == 0 if isinstance(freq, int) else epoch + 1 in freq
