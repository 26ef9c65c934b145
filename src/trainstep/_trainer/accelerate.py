"""`accelerate`: a compiled Keras model whose own methods run through trainstep.

The methods are put on the object itself, in front of those of its class, with Keras's signatures
and return values. What trainstep does not do the same way is left to Keras: a model with its own
`train_step`, or one that is run eagerly.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from keras import ops, tree

from trainstep._trainer.logs import Logs
from trainstep._trainer.recipe import own_steps
from trainstep._trainer.trainer import Trainer

M = TypeVar("M")

_METHODS = ("train_on_batch", "test_on_batch", "predict_on_batch", "fit", "evaluate", "predict")
_MARK = "_trainstep_accelerated"


def accelerate(model: M) -> M:
    """Makes a Keras model's own training methods run through trainstep.

    `train_on_batch`, `test_on_batch`, `predict_on_batch`, `fit`, `evaluate` and `predict` of this
    object keep their arguments and what they return, so a script changes one line. The model may be
    compiled before or after, and again. `restore` undoes it.

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
    own = own_steps(model)
    if own:
        warnings.warn(
            f"{type(model).__name__} {getattr(model, 'name', '')!r} is left to Keras: its "
            f"`{'`, `'.join(own)}` is its own; write that step as a `trainstep.function`",
            stacklevel=2,
        )
        return model
    accelerated = _Accelerated(model)
    vars(model)[_MARK] = True
    for name in _METHODS:
        vars(model)[name] = accelerated.method(name)
    return model


def restore(model: M) -> M:
    """Gives a model that was accelerated its Keras methods back.

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


class _Accelerated:
    """Keras's methods, on the steps of a trainer."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._made: Trainer | None = None

    def method(self, name: str) -> Callable[..., Any]:
        """One of the methods, or Keras's where the model asks for that."""
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
        """The trainer of the model as it is compiled now."""
        made = self._made
        if made is None or not made.is_of_this_compilation():
            made = self._made = Trainer(self._model, check_values=False)
        return made

    def _returned(self, logs: Logs, return_dict: bool) -> Any:
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
        return self._returned(logs, return_dict)

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        return self._returned(self._trainer.test_on_batch(x, y, sample_weight), return_dict)

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
