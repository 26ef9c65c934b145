"""The train, test and predict steps of a Keras model, written once for every engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import ops, tree

from trainstep._common.errors import GradientError
from trainstep._data.batch_checks import both_weights_error
from trainstep._function.inside.gradients import value_and_grad
from trainstep._state.scopes import note_packable, rehearsed
from trainstep._trainer.recipe import Recipe

Values = dict[str, Any]
Forward = Callable[[Any], tuple[Any, Any]]


class Steps:
    """The steps of one model with one recipe.

    `x`, `y` and `weights` are the parts of a batch; `classes` is an array of class numbers and
    their weights, or None. `reset` is whether metrics are reset first: True, False, or a tensor.
    """

    def __init__(self, model: Any, recipe: Recipe) -> None:
        self._model = model
        self._recipe = recipe

    def train(self, x: Any, y: Any, weights: Any, classes: Any, reset: Any) -> Values:
        """Updates the weights; returns the loss and the metrics."""
        with self._recipe.installed():
            weights = apply_class_weights(y, weights, classes)
            (y_pred, _), _, gradients = self.backward(x, y, weights, reset=reset)
            self.apply(gradients)
            return self._metrics(x, y, y_pred, weights)

    def test(self, x: Any, y: Any, weights: Any, classes: Any, reset: Any) -> Values:
        """Returns the loss and the metrics without training."""
        with self._recipe.installed():
            weights = apply_class_weights(y, weights, classes)
            self._recipe.reset_metrics_where(reset, compiled=False)
            y_pred = self.forward(x, training=False)
            self.tracked_loss(x, y, y_pred, weights, reset, training=False)
            return self._metrics(x, y, y_pred, weights)

    def backward(
        self, x: Any, y: Any, weights: Any, *, reset: Any, forward: Forward | None = None
    ) -> tuple[tuple[Any, Any], Any, list[Any]]:
        """Returns both results of `forward`, the loss, and the gradients of the scaled loss."""
        model, recipe = self._model, self._recipe
        optimizer = recipe.optimizer

        def scaled_loss() -> tuple[Any, Any]:
            recipe.reset_metrics_where(reset, compiled=False)
            y_pred, extra = forward(x) if forward else (self.forward(x, training=True), None)
            loss = self.tracked_loss(x, y, y_pred, weights, reset, training=True)
            return optimizer.scale_loss(loss), ((y_pred, extra), loss)

        def trainable_variables() -> list[Any]:
            # Asked for after the call of the model: before it, layers may not be built.
            if not model.trainable_variables:
                raise nothing_to_train_error(model)
            return model.trainable_variables  # type: ignore[no-any-return]

        (_, (outputs, loss)), gradients = value_and_grad(
            scaled_loss, trainable_variables, has_aux=True
        )()
        return outputs, loss, gradients

    def apply(self, gradients: list[Any]) -> None:
        """Applies gradients to the trainable weights."""
        variables = self._model.trainable_variables
        self._recipe.optimizer.apply(gradients, variables)

    def tracked_loss(
        self, x: Any, y: Any, y_pred: Any, weights: Any, reset: Any, *, training: bool
    ) -> Any:
        """Resets metrics where `reset` is true, and returns the loss, added to its metric."""
        self._build_loss_and_metrics(x, y, y_pred, weights)
        self._recipe.reset_metrics_where(reset, compiled=True)
        loss = self._loss(x, y, y_pred, weights, training=training)
        _track(self._recipe.tracker, loss, batch_size(x))
        return loss

    def predict(self, x: Any) -> Any:
        """Returns the outputs in inference mode."""
        return self.forward(x, training=False)

    def forward(self, x: Any, *, training: bool) -> Any:
        """Calls the model."""
        model = self._model
        return model(x, training=training) if model._call_has_training_arg else model(x)

    def loss(self, x: Any, y: Any, y_pred: Any, weights: Any) -> Any:
        """Returns the training loss of given outputs, and adds it to no metric."""
        with self._recipe.installed():
            self._build_loss_and_metrics(x, y, y_pred, weights)
            return self._loss(x, y, y_pred, weights, training=True)

    def _loss(self, x: Any, y: Any, y_pred: Any, weights: Any, *, training: bool) -> Any:
        """Calls the model's own `compute_loss`."""
        return self._model._compute_loss(
            x=x, y=y, y_pred=y_pred, sample_weight=weights, training=training
        )

    def _metrics(self, x: Any, y: Any, y_pred: Any, weights: Any) -> Values:
        """Returns the values of the model's own `compute_metrics` after this batch."""
        values = dict(self._model.compute_metrics(x, y, y_pred, sample_weight=weights))
        # The step returns the values, so user code seldom reads these variables: packing them pays.
        for metric in self._model.metrics:
            note_packable("metric", metric.variables)
        note_packable("metric", [self._recipe.reset_each_batch])
        return values

    def _build_loss_and_metrics(self, x: Any, y: Any, y_pred: Any, weights: Any) -> None:
        """Builds losses and metrics that need a first batch: a reset needs their variables."""
        if self._recipe.has_unbuilt():
            with rehearsed():
                self._loss(x, y, y_pred, weights, training=True)
                self._model.compute_metrics(x, y, y_pred, sample_weight=weights)


def _track(tracker: Any, loss: Any, rows: Any) -> None:
    """Adds the loss of a batch of `rows` to its metric."""
    if type(tracker) is not keras.metrics.Mean or len(loss.shape) != 0:
        tracker.update_state(loss, sample_weight=rows)
        return
    # The same update as `update_state` of a scalar, in a quarter of the operations.
    rows = ops.convert_to_tensor(rows, dtype=tracker.dtype)
    tracker.total.assign_add(ops.cast(loss, tracker.dtype) * rows)
    tracker.count.assign_add(rows)


def batch_size(x: Any) -> Any:
    """Returns the number of samples in a batch."""
    return next(ops.shape(leaf)[0] for leaf in tree.flatten(x) if leaf is not None)


def apply_class_weights(y: Any, weights: Any, classes: Any) -> Any:
    """Returns sample weights by the class of each sample; an unlisted class has weight 1."""
    if classes is None:
        return weights
    if weights is not None:
        raise both_weights_error()
    labels, classes = ops.convert_to_tensor(y), ops.convert_to_tensor(classes)
    if len(labels.shape) > 1:
        one_hot = labels.shape[-1] != 1
        labels = ops.argmax(labels, axis=-1) if one_hot else ops.squeeze(labels, axis=-1)
    labels = ops.round(ops.cast(labels, classes.dtype))
    match = ops.cast(ops.equal(ops.expand_dims(labels, -1), classes[0]), classes.dtype)
    return ops.sum(match * classes[1], axis=-1) + 1 - ops.max(match, axis=-1)


def nothing_to_train_error(model: Any) -> GradientError:
    """The error for a model without trainable weights."""
    return GradientError(
        f"{type(model).__name__} {model.name!r} has no trainable weights.\n"
        "  to fix:   set `trainable = True` on the model or on one of its layers"
    )
