"""`accelerate`: makes a Keras model's own methods run through trainstep.

The new methods are attributes of the model object, so they shadow those of its class. They have
Keras's signatures and return values. Keras still runs a model that overrides `train_step` or has
`run_eagerly` set.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from keras import ops, tree

from trainstep._trainer.logs import Logs
from trainstep._trainer.recipe import overridden_steps
from trainstep._trainer.trainer import Trainer

M = TypeVar("M")

_METHODS = ("train_on_batch", "test_on_batch", "predict_on_batch", "fit", "evaluate", "predict")
_MARK = "_trainstep_accelerated"


def accelerate(model: M) -> M:
    """Makes a Keras model's own training methods run through trainstep.

    `train_on_batch`, `test_on_batch`, `predict_on_batch`, `fit`, `evaluate` and `predict` of this
    object keep their arguments and return values, so a script changes one line. You may compile the
    model before or after, and again later. `restore` undoes it.

    Args:
        model: A Keras model.

    Returns:
        The same model.

    Example:
        >>> import keras, numpy as np, trainstep as ts
        >>> model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> model = ts.accelerate(model)
        >>> history = model.fit(np.ones((8, 2)), np.ones((8, 1)), epochs=2, verbose=0)
        >>> len(history.history["loss"])
        2
    """
    if _MARK in vars(model):
        return model
    overridden = overridden_steps(model)
    if overridden:
        warnings.warn(
            f"{type(model).__name__} {getattr(model, 'name', '')!r} is not accelerated: it "
            f"overrides `{'`, `'.join(overridden)}`; write that step as a `trainstep.function`",
            stacklevel=2,
        )
        return model
    accelerated = _KerasMethods(model)
    vars(model)[_MARK] = True
    for name in _METHODS:
        vars(model)[name] = accelerated.method(name)
    return model


def restore(model: M) -> M:
    """Restores the Keras methods of an accelerated model.

    Example:
        >>> import keras, trainstep as ts
        >>> model = ts.accelerate(keras.Sequential([keras.layers.Dense(1)]))
        >>> "fit" in vars(ts.restore(model))
        False
    """
    if vars(model).pop(_MARK, None):
        for name in _METHODS:
            vars(model).pop(name, None)
    return model


class _KerasMethods:
    """Keras's training methods, run by a trainer."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._current: Trainer | None = None

    def method(self, name: str) -> Callable[..., Any]:
        """Returns a method that runs ours, or Keras's if the model is eager or not compiled."""
        original = getattr(type(self._model), name)
        ours = getattr(self, name)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            if not self._model.compiled or self._model.run_eagerly:
                return original(self._model, *args, **kwargs)
            return ours(*args, **kwargs)

        return method

    @property
    def _trainer(self) -> Trainer:
        """The trainer of the model's current compilation."""
        current = self._current
        if current is None or not current.is_of_this_compilation():
            # `check_values=False`: Keras trains on NaN without an error, and so must this.
            current = self._current = Trainer(self._model, check_values=False)
        return current

    def _as_keras_result(self, logs: Logs, return_dict: bool) -> Any:
        return dict(logs) if return_dict else self._model._flatten_metrics_in_order(dict(logs))

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        logs = self._trainer.train_on_batch(x, y, sample_weight, class_weight)
        return self._as_keras_result(logs, return_dict)

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        return self._as_keras_result(self._trainer.test_on_batch(x, y, sample_weight), return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        return tree.map_structure(ops.convert_to_numpy, self._trainer.predict_on_batch(x))

    def fit(  # noqa: PLR0917
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> Any:
        return self._trainer.fit(
            x,
            y,
            batch_size=batch_size,
            epochs=epochs,
            progress=_progress(verbose),
            callbacks=callbacks,
            validation_split=validation_split,
            validation_data=validation_data,
            shuffle=bool(shuffle),
            class_weight=class_weight,
            sample_weight=sample_weight,
            initial_epoch=initial_epoch,
            steps_per_epoch=steps_per_epoch,
            validation_steps=validation_steps,
            validation_batch_size=validation_batch_size,
            validation_freq=validation_freq,
            steps_per_call=self._model.steps_per_execution,
        )

    def evaluate(  # noqa: PLR0917
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
    ) -> Any:
        logs = self._trainer.evaluate(
            x,
            y,
            batch_size=batch_size,
            progress=_progress(verbose),
            sample_weight=sample_weight,
            steps=steps,
            callbacks=callbacks,
        )
        return logs if return_dict else self._model._flatten_metrics_in_order(logs)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        return self._trainer.predict(
            x, batch_size=batch_size, progress=_progress(verbose), steps=steps, callbacks=callbacks
        )


def _progress(verbose: str | int) -> bool | str:
    return "lines" if verbose == 2 else bool(verbose)
