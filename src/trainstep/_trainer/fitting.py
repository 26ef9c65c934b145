"""`fit`, `evaluate` and `predict` of a trainer: the methods that run over data sets."""

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
from trainstep._trainer.compiled_steps import CompiledSteps, StepRunner
from trainstep._trainer.progress import Progress, make_progress
from trainstep._trainer.recipe import Recipe
from trainstep._trainer.resumed_run import CheckpointedRun


class FitMethods:
    """The methods of a trainer that run over data sets.

    Attributes:
        model: The model.
    """

    model: Any
    _functions: CompiledSteps
    _recipe: Recipe
    _layout: Any
    _is_accumulating = False  # True in `fit` and `evaluate`: metrics accumulate over batches

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
        """Trains for some epochs, like `keras.Model.fit`.

        Args:
            x: Arrays, `(x, y)` or `(x, y, sample_weight)` of arrays, or a source of batches: a
                `tf.data.Dataset`, a torch `DataLoader`, a `keras.utils.PyDataset`, a generator, an
                iterator, or a function that returns one for each epoch.
            y: The targets, for arrays.
            epochs: The total number of epochs, including those before `initial_epoch`.
            batch_size: For arrays; 32 by default.
            sample_weight: A weight per sample, for arrays.
            class_weight: A weight per class, by its number.
            validation_data: Data to evaluate after an epoch, in any form that `x` may have.
            validation_split: The share of the arrays, taken from their end, to validate with.
            validation_steps: Batches in a validation; all by default.
            validation_batch_size: `batch_size` by default.
            validation_freq: The number of epochs between validations, or a list of epochs.
            shuffle: Whether to shuffle arrays in each epoch, with NumPy's generator.
            callbacks: Keras callbacks.
            initial_epoch: The number of the first epoch.
            steps_per_epoch: Batches in an epoch; all by default.
            steps_per_call: Steps that one call of the program runs. The results are the same;
                batch hooks of callbacks run after the call.
            checkpoints: Saves the state, and resumes from the newest one; see `Checkpoints`.
            progress: True for a bar, `"lines"` for a line per epoch, False for nothing.

        Returns:
            A Keras `History`.
        """
        check_positive("Trainer.fit", steps_per_call=steps_per_call)
        epochs = min(epochs, keras.config.max_epochs() or epochs)
        data = split_batch(x, y, sample_weight)
        classes = class_weight_table(class_weight, data[2])
        if validation_split and validation_data is None:
            data, validation_data = split_validation(data, validation_split)
        steps = _smallest(steps_per_epoch, keras.config.max_steps_per_epoch())
        source = self._feed(*data, batch_size=batch_size, steps=steps, shuffle=shuffle)
        self._recipe.install()
        with self._bar(progress, epochs) as bar, self._metrics_accumulate(True):
            params = _params(epochs, source, progress)
            called = Callbacks(callbacks, self.model, history=True, **params)
            fit = functools.partial(
                loop.fit,
                self,
                StepRunner(self._functions, "train", classes),
                source,
                epochs=range(initial_epoch, epochs),
                steps_per_call=steps_per_call,
                callbacks=called,
                progress=bar,
                validate=self._validation(
                    validation_data, validation_batch_size or batch_size, validation_steps, called
                ),
                validate_at=lambda epoch: _is_validation_due(epoch, validation_freq),
            )
            self._run_with_checkpoints(checkpoints, fit, trains=epochs > initial_epoch)
        return self.model.history

    def _run_with_checkpoints(
        self, checkpoints: Checkpoints | None, fit: Any, *, trains: bool
    ) -> None:
        """Runs a fit, with checkpoints if the user passed any."""
        optimizer = self._recipe.optimizer
        try:
            if checkpoints is None:
                fit()
            else:
                with checkpoints.running():
                    fit(run=CheckpointedRun(self, checkpoints))
        finally:  # Keras does so too: an optimizer with `use_ema` writes its averages here
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
        """Returns the loss and metrics over a data set; see `fit` for the arguments."""
        source = self._feed(*split_batch(x, y, sample_weight), batch_size=batch_size, steps=steps)
        params = _params(1, source, progress)
        self._recipe.install()
        with self._bar(progress, 1) as bar, self._metrics_accumulate(True):
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
        """Returns the outputs over a data set as NumPy arrays; see `fit` for the arguments."""
        source = self._feed(x, batch_size=batch_size, steps=steps)
        params = _params(1, source, progress)
        self._recipe.install()
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
        return make_progress(shows, self.model, epochs, self._functions.retraces)

    @contextlib.contextmanager
    def _metrics_accumulate(self, accumulate: bool) -> Iterator[None]:
        """Makes metrics accumulate over batches, or reset at each batch, inside the block."""
        before = self._is_accumulating
        if before is accumulate:
            yield
            return
        self._is_accumulating = accumulate
        self._recipe.set_reset_each_batch(not accumulate)
        is_process_lost = False
        try:
            yield
        except ProcessLostError:
            is_process_lost = True
            raise
        finally:
            # Writing a variable of many processes would wait for the lost one forever.
            if not is_process_lost:
                self._is_accumulating = before
                self._recipe.set_reset_each_batch(not before)


def _params(epochs: int, source: Feed, progress: bool | str) -> dict[str, Any]:
    """Returns the `params` of callbacks."""
    return {"epochs": epochs, "steps": source.steps, "verbose": int(bool(progress))}


def _smallest(*numbers: int | None) -> int | None:
    return min((number for number in numbers if number), default=None)


def _is_validation_due(epoch: int, freq: int | Sequence[int]) -> bool:
    """Whether a validation follows this epoch."""
    return (epoch + 1) % freq == 0 if isinstance(freq, int) else epoch + 1 in freq
