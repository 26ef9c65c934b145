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
    """The steps of one model, trained by one recipe.

    `x`, `y` and `weights` are what a Keras data set yields; `classes` is an array of class numbers
    and their weights, or None. `fresh` tells whether metrics start anew: True, False, or a tensor.
    """

    def __init__(self, model: Any, recipe: Recipe) -> None:
        self._model = model
        self._recipe = recipe

    def train(self, x: Any, y: Any, weights: Any, classes: Any, fresh: Any) -> Values:
        """One update of the weights; the loss and the metrics."""
        with self._recipe.lent():
            weights = weighted_by_class(y, weights, classes)
            (y_pred, _), _, gradients = self.backward(x, y, weights, fresh=fresh)
            self.apply(gradients)
            return self._metrics(x, y, y_pred, weights)

    def test(self, x: Any, y: Any, weights: Any, classes: Any, fresh: Any) -> Values:
        """The loss and the metrics, nothing trained."""
        with self._recipe.lent():
            weights = weighted_by_class(y, weights, classes)
            self._recipe.start_metrics(fresh, compiled=False)
            y_pred = self.forward(x, training=False)
            self.measured(x, y, y_pred, weights, fresh, training=False)
            return self._metrics(x, y, y_pred, weights)

    def backward(
        self, x: Any, y: Any, weights: Any, *, fresh: Any, forward: Forward | None = None
    ) -> tuple[tuple[Any, Any], Any, list[Any]]:
        """The outputs and what else `forward` gives, the loss, and the gradients, scaled."""
        model, recipe = self._model, self._recipe
        optimizer = recipe.optimizer

        def loss_of() -> tuple[Any, Any]:
            recipe.start_metrics(fresh, compiled=False)
            y_pred, extra = forward(x) if forward else (self.forward(x, training=True), None)
            loss = self.measured(x, y, y_pred, weights, fresh, training=True)
            return optimizer.scale_loss(loss), ((y_pred, extra), loss)

        def trained() -> list[Any]:
            # Known once the model was called: until then, layers inside may not be built.
            if not model.trainable_variables:
                raise nothing_to_train(model)
            return model.trainable_variables  # type: ignore[no-any-return]

        (_, (outputs, loss)), gradients = value_and_grad(loss_of, trained, has_aux=True)()
        return outputs, loss, gradients

    def apply(self, gradients: list[Any]) -> None:
        """Updates the weights by their gradients."""
        variables = self._model.trainable_variables
        self._recipe.optimizer.apply(gradients, variables)

    def measured(
        self, x: Any, y: Any, y_pred: Any, weights: Any, fresh: Any, *, training: bool
    ) -> Any:
        """The loss, entered into its metric, after the metrics have started anew or not."""
        self._build(x, y, y_pred, weights)
        self._recipe.start_metrics(fresh, compiled=True)
        loss = self._loss(x, y, y_pred, weights, training=training)
        _track(self._recipe.tracker, loss, batch_size(x))
        return loss

    def predict(self, x: Any) -> Any:
        """The outputs."""
        return self.forward(x, training=False)

    def forward(self, x: Any, *, training: bool) -> Any:
        """The outputs of the model."""
        model = self._model
        return model(x, training=training) if model._call_has_training_arg else model(x)

    def loss(self, x: Any, y: Any, y_pred: Any, weights: Any) -> Any:
        """The loss of outputs in training, entered into no metric."""
        with self._recipe.lent():
            self._build(x, y, y_pred, weights)
            return self._loss(x, y, y_pred, weights, training=True)

    def _loss(self, x: Any, y: Any, y_pred: Any, weights: Any, *, training: bool) -> Any:
        """The loss, by the model's own `compute_loss`."""
        return self._model._compute_loss(
            x=x, y=y, y_pred=y_pred, sample_weight=weights, training=training
        )

    def _metrics(self, x: Any, y: Any, y_pred: Any, weights: Any) -> Values:
        """The values of the metrics after this batch, by the model's own `compute_metrics`."""
        values = dict(self._model.compute_metrics(x, y, y_pred, sample_weight=weights))
        # What they are is returned, and so there is no need to ask the metrics themselves.
        for metric in self._model.metrics:
            note_packable("metric", metric.variables)
        note_packable("metric", [self._recipe.fresh])
        return values

    def _build(self, x: Any, y: Any, y_pred: Any, weights: Any) -> None:
        """Lets losses and metrics that look at their first batch do so, before they start anew."""
        if self._recipe.unbuilt():
            with rehearsed():
                self._loss(x, y, y_pred, weights, training=True)
                self._model.compute_metrics(x, y, y_pred, sample_weight=weights)


def _track(tracker: Any, loss: Any, rows: Any) -> None:
    """Enters the loss of so many rows into its metric."""
    if type(tracker) is not keras.metrics.Mean or len(loss.shape) != 0:
        tracker.update_state(loss, sample_weight=rows)
        return
    # What that does with one number, in a fourth of its operations.
    rows = ops.convert_to_tensor(rows, dtype=tracker.dtype)
    tracker.total.assign_add(ops.cast(loss, tracker.dtype) * rows)
    tracker.count.assign_add(rows)


def batch_size(x: Any) -> Any:
    """How many samples a batch has."""
    return next(ops.shape(leaf)[0] for leaf in tree.flatten(x) if leaf is not None)


def weighted_by_class(y: Any, weights: Any, classes: Any) -> Any:
    """Weights by sample, looked up by the class of each; a class that is not named weighs 1."""
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


def nothing_to_train(model: Any) -> GradientError:
    """A model all of whose weights are frozen, or that has none."""
    return GradientError(
        f"{type(model).__name__} {model.name!r} has no trainable weights: there is nothing to "
        "train.\n"
        "  to fix:   set `trainable = True` on the model or on some of its layers"
    )
