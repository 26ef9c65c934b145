"""Tasks: the losses and metrics of Keras, and the ways to reduce, weigh and add to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, losses, metrics, ops, regularizers

from .base import (
    Array,
    Batch,
    Built,
    Tensor,
    add,
    bits,
    case,
    fit,
    floats,
    ids,
    mlp,
    one_hot,
    own,
    sparse,
    squared,
    uniform,
)

# Of each loss: how it is made, the last activation, the outputs, and the targets.
LOSSES: dict[str, tuple[Callable[[], Any], str | None, int, Array]] = {
    "hinge": (losses.Hinge, None, 1, bits(1)),
    "squared_hinge": (losses.SquaredHinge, None, 1, bits(1)),
    "categorical_hinge": (losses.CategoricalHinge, None, 3, one_hot(3)),
    "huber": (lambda: losses.Huber(0.5), None, 2, floats(2)),
    "log_cosh": (losses.LogCosh, None, 2, floats(2)),
    "mean_absolute": (losses.MeanAbsoluteError, None, 2, floats(2)),
    "mean_absolute_percentage": (losses.MeanAbsolutePercentageError, None, 2, uniform(2)),
    "mean_squared_logarithmic": (losses.MeanSquaredLogarithmicError, "softplus", 2, uniform(2)),
    "kl_divergence": (losses.KLDivergence, "softmax", 3, uniform(3)),
    "poisson": (losses.Poisson, "softplus", 2, uniform(2)),
    "cosine_similarity": (losses.CosineSimilarity, None, 3, floats(3)),
    "dice": (losses.Dice, "sigmoid", 4, bits(4)),
    "dice_by_row": (lambda: losses.Dice(axis=1), "sigmoid", 4, bits(4)),
    "tversky": (lambda: losses.Tversky(0.3, 0.7), "sigmoid", 4, bits(4)),
    "binary_focal": (losses.BinaryFocalCrossentropy, "sigmoid", 1, bits(1)),
    "categorical_focal": (losses.CategoricalFocalCrossentropy, "softmax", 3, one_hot(3)),
    "categorical_generalized": (
        losses.CategoricalGeneralizedCrossEntropy,
        "softmax",
        3,
        ids(3),
    ),
    "smoothed_labels": (
        lambda: losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
        None,
        3,
        one_hot(3),
    ),
    "circle": (losses.Circle, None, 4, ids(3)),
    "reduction_sum": (lambda: losses.MeanSquaredError(reduction="sum"), None, 2, floats(2)),
}


def _with_loss(make: Callable[[], Any], last: str | None, outputs: int, y: Array) -> Built:
    return fit(mlp(outputs, last=last), make(), x=floats(6), y=y)


for _name, _row in LOSSES.items():
    add(f"loss_{_name}", "task", lambda row=_row: _with_loss(*row))


# Reductions and weights


@case("task")
def reduction_none_and_own_mean() -> Built:
    loss = losses.MeanSquaredError(reduction=None)
    return fit(mlp(), lambda y, predicted: ops.mean(loss(y, predicted)), x=floats(6), y=floats(2))


@case("task")
def plain_function_that_returns_a_scalar() -> Built:
    return fit(mlp(), lambda y, p: ops.mean(ops.square(y - p)), x=floats(6), y=floats(2))


@case("task")
def sum_divided_by_the_size() -> Built:
    def loss(y: Tensor, predicted: Tensor) -> Tensor:
        rows = ops.cast(ops.shape(predicted)[0], "float32")
        return ops.sum(ops.square(y - predicted)) / rows

    return fit(mlp(), loss, x=floats(6), y=floats(2))


def _weighted(loss: Any, metric: keras.Metric) -> Built:
    model, tracker = mlp(), metrics.Mean()

    def loss_of(batch: Batch) -> Tensor:
        predicted = model(batch["x"], training=True)
        metric.update_state(batch["y"], predicted, sample_weight=batch["weights"])
        value = loss(batch["y"], predicted, sample_weight=batch["weights"])
        tracker.update_state(value, sample_weight=ops.shape(batch["x"])[0])
        return value

    arrays = {"x": floats(6), "y": floats(2), "weights": uniform()}
    return Built((model,), loss_of, arrays, (metric, tracker))


@case("task")
def sample_weights() -> Built:
    return _weighted(losses.MeanSquaredError(), metrics.MeanAbsoluteError())


@case("task")
def mean_with_sample_weight() -> Built:
    loss = losses.MeanSquaredError(reduction="mean_with_sample_weight")
    return _weighted(loss, metrics.RootMeanSquaredError())


@case("task")
def class_weights() -> Built:
    model, loss = mlp(3), sparse()
    by_class = np.array([0.5, 2.0, 1.0], "float32")

    def loss_of(batch: Batch) -> Tensor:
        weights = ops.take(ops.convert_to_tensor(by_class), batch["y"])
        return loss(batch["y"], model(batch["x"], training=True), sample_weight=weights)

    return own(model, loss_of, x=floats(6), y=ids(3))


# What a model adds to its loss


class MeanOfActivations(layers.Layer):
    """Adds the mean size of what passes through to the loss."""

    def call(self, x: Tensor) -> Tensor:
        self.add_loss(0.1 * ops.mean(ops.abs(x)))
        return x


@case("task")
def add_loss() -> Built:
    return fit(mlp(2, MeanOfActivations()), losses.MeanSquaredError(), x=floats(6), y=floats(2))


@case("task")
def activity_regularizer() -> Built:
    model = mlp(activity_regularizer=regularizers.L2(0.1))
    return fit(model, losses.MeanSquaredError(), x=floats(6), y=floats(2))


@case("task")
def weight_regularizer() -> Built:
    model = mlp(kernel_regularizer=regularizers.L1L2(0.1, 0.1))
    return fit(model, losses.MeanSquaredError(), x=floats(6), y=floats(2))


# Metrics


class Rows(keras.Metric):
    """Counts rows, and adds up their worst errors; it knows nothing of weights."""

    def __init__(self) -> None:
        super().__init__(name="rows")
        self.worst = self.add_variable((), "zeros", name="worst")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y: Tensor, predicted: Tensor, sample_weight: None = None) -> None:
        self.worst.assign_add(ops.sum(ops.max(ops.abs(y - predicted), axis=-1)))
        self.count.assign_add(ops.cast(ops.shape(predicted)[0], "float32"))

    def result(self) -> Tensor:
        return self.worst / self.count


# Of each metric: how it is made, the last activation, the outputs, and the targets.
METRICS: dict[str, tuple[Callable[[], keras.Metric], str | None, int, Array]] = {
    "auc": (lambda: metrics.AUC(num_thresholds=20), "sigmoid", 1, bits(1)),
    "precision": (metrics.Precision, "sigmoid", 1, bits(1)),
    "recall": (metrics.Recall, "sigmoid", 1, bits(1)),
    "f1": (metrics.F1Score, "softmax", 3, one_hot(3)),
    "r2": (metrics.R2Score, None, 2, floats(2)),
    "mean_iou": (
        lambda: metrics.MeanIoU(3, sparse_y_true=False, sparse_y_pred=False),
        "softmax",
        3,
        one_hot(3),
    ),
    "rmse": (metrics.RootMeanSquaredError, None, 2, floats(2)),
    "top_k_accuracy": (lambda: metrics.TopKCategoricalAccuracy(2), "softmax", 3, one_hot(3)),
    "false_negatives": (metrics.FalseNegatives, "sigmoid", 1, bits(1)),
    "cosine": (metrics.CosineSimilarity, None, 3, floats(3)),
    "counts_rows": (Rows, None, 2, floats(2)),
}


def _with_metric(
    make: Callable[[], keras.Metric], last: str | None, outputs: int, y: Array
) -> Built:
    model, metric = mlp(outputs, last=last), make()
    metric.update_state(np.ones((2, outputs), "float32"), np.ones((2, outputs), "float32"))
    metric.reset_state()  # some make their variables when they first see data
    return fit(model, lambda y, p: ops.mean(squared(y, p)), [metric], x=floats(6), y=y)


for _name, _row in METRICS.items():
    add(f"metric_{_name}", "task", lambda row=_row: _with_metric(*row))


@case("task")
def weighted_metrics() -> Built:
    """AUC, precision and R2 under weights of the rows."""
    model = mlp(1, last="sigmoid")
    weighted = (metrics.AUC(num_thresholds=20), metrics.Precision(), metrics.BinaryAccuracy())

    def loss_of(batch: Batch) -> Tensor:
        predicted = model(batch["x"], training=True)
        for metric in weighted:
            metric.update_state(batch["y"], predicted, sample_weight=batch["weights"])
        return ops.mean(squared(batch["y"], predicted))

    arrays = {"x": floats(6), "y": bits(1), "weights": uniform()}
    return Built((model,), loss_of, arrays, weighted)
