"""Tasks: models as people train them, with the layers that mix or normalise positions."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, losses, metrics, ops

from .base import (
    Batch,
    Built,
    Tensor,
    bits,
    case,
    chain,
    fit,
    floats,
    ids,
    mlp,
    own,
    sparse,
    squared,
)

IMAGE = (8, 8, 2)


def classify(*stack: layers.Layer) -> Built:
    """Images to three classes."""
    model = chain(IMAGE, *stack, layers.Dense(3))
    accuracy = metrics.SparseCategoricalAccuracy()
    return fit(model, sparse(), [accuracy], x=floats(*IMAGE), y=ids(3))


def regress(*middle: layers.Layer, **dense: object) -> Built:
    """Six numbers to two, with layers in the middle."""
    return fit(mlp(2, *middle, **dense), losses.MeanSquaredError(), x=floats(6), y=floats(2))


@case("task")
def dense_regression() -> Built:
    error = metrics.MeanAbsoluteError()
    return fit(mlp(), losses.MeanSquaredError(), [error], x=floats(6), y=floats(2))


@case("task")
def dense_classification() -> Built:
    return fit(mlp(3), sparse(), [metrics.SparseCategoricalAccuracy()], x=floats(6), y=ids(3))


@case("task")
def binary_classification() -> Built:
    model = mlp(1, last="sigmoid")
    return fit(
        model, losses.BinaryCrossentropy(), [metrics.BinaryAccuracy()], x=floats(6), y=bits(1)
    )


@case("task")
def conv_classifier() -> Built:
    same = layers.Conv2D(4, 3, activation="relu", padding="same")
    return classify(same, layers.MaxPooling2D(), layers.Conv2D(4, 3), layers.Flatten())


@case("task")
def strided_conv() -> Built:
    return classify(layers.Conv2D(4, 3, strides=2, padding="same"), layers.GlobalMaxPooling2D())


@case("task")
def depthwise_conv() -> Built:
    return classify(layers.DepthwiseConv2D(3, depth_multiplier=2), layers.Flatten())


@case("task")
def separable_conv() -> Built:
    return classify(layers.SeparableConv2D(4, 3, activation="gelu"), layers.Flatten())


@case("task")
def transposed_conv() -> Built:
    up = layers.Conv2DTranspose(3, 3, strides=2, padding="same")
    return classify(layers.Conv2D(3, 3, strides=2), up, layers.GlobalAveragePooling2D())


@case("task")
def grouped_conv() -> Built:
    return classify(layers.Conv2D(4, 3, groups=2, dilation_rate=2), layers.Flatten())


@case("task")
def max_pooling() -> Built:
    return classify(layers.Conv2D(3, 3), layers.MaxPooling2D(3, 2, "same"), layers.Flatten())


@case("task")
def average_pooling() -> Built:
    return classify(layers.Conv2D(3, 3), layers.AveragePooling2D(2), layers.Flatten())


@case("task")
def residual_block() -> Built:
    x = layers.Input(IMAGE)
    h = layers.BatchNormalization()(layers.Conv2D(4, 3, padding="same")(x))
    h = layers.ReLU()(layers.Add()([h, layers.Conv2D(4, 1)(x)]))
    model = keras.Model(x, layers.Dense(3)(layers.GlobalAveragePooling2D()(h)))
    return fit(model, sparse(), x=floats(*IMAGE), y=ids(3))


@case("task")
def batch_norm_dense() -> Built:
    return regress(layers.BatchNormalization(momentum=0.7))


@case("task")
def batch_norm_conv() -> Built:
    norm = layers.BatchNormalization(momentum=0.7)
    return classify(layers.Conv2D(4, 3), norm, layers.ReLU(), layers.GlobalAveragePooling2D())


@case("task")
def batch_norm_unscaled() -> Built:
    return regress(layers.BatchNormalization(center=False, scale=False))


@case("task")
def layer_norm() -> Built:
    return regress(layers.LayerNormalization())


@case("task")
def group_norm() -> Built:
    return classify(layers.Conv2D(4, 3), layers.GroupNormalization(2), layers.Flatten())


@case("task")
def dropout() -> Built:
    return regress(layers.Dropout(0.4, seed=1))


@case("task")
def spatial_dropout() -> Built:
    return classify(layers.Conv2D(4, 3), layers.SpatialDropout2D(0.4, seed=1), layers.Flatten())


@case("task")
def gaussian_noise() -> Built:
    return regress(layers.GaussianNoise(0.3, seed=1))


@case("task")
def gaussian_and_alpha_dropout() -> Built:
    return regress(layers.GaussianDropout(0.3, seed=1), layers.AlphaDropout(0.2, seed=2))


class Sampling(layers.Layer):
    """Draws from the normal that the first and second half of its input describe."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = keras.random.SeedGenerator(3)

    def call(self, x: Tensor) -> Tensor:
        mean, log_variance = x[:, :3], x[:, 3:]
        divergence = 1 + log_variance - ops.square(mean) - ops.exp(log_variance)
        self.add_loss(-0.5 * ops.mean(ops.sum(divergence, axis=-1)))
        noise = keras.random.normal(ops.shape(mean), seed=self.seed)
        return mean + ops.exp(0.5 * log_variance) * noise


@case("task")
def variational_autoencoder() -> Built:
    model = chain((6,), layers.Dense(6), Sampling(), layers.Dense(6))
    return fit(model, losses.MeanSquaredError(), x=floats(6), y=floats(6))


@case("task")
def multi_input() -> Built:
    left, right = layers.Input((4,)), layers.Input((3,))
    h = layers.Concatenate()([layers.Dense(5, activation="relu")(left), layers.Dense(5)(right)])
    model = keras.Model([left, right], layers.Dense(2)(h))

    def loss_of(batch: Batch) -> Tensor:
        predicted = model([batch["left"], batch["right"]], training=True)
        return ops.mean(squared(batch["y"], predicted))

    return own(model, loss_of, left=floats(4), right=floats(3), y=floats(2))


@case("task")
def multi_output() -> Built:
    x = layers.Input((6,))
    h = layers.Dense(5, activation="relu")(x)
    model = keras.Model(x, {"number": layers.Dense(2)(h), "kind": layers.Dense(3)(h)})
    number, kind = losses.MeanSquaredError(), sparse()

    def loss_of(batch: Batch) -> Tensor:
        predicted = model(batch["x"], training=True)
        of_numbers = number(batch["number"], predicted["number"])
        return 0.3 * of_numbers + 2 * kind(batch["kind"], predicted["kind"])

    return own(model, loss_of, x=floats(6), number=floats(2), kind=ids(3))


def _compiled(model: keras.Model, weighted: bool) -> Built:
    """A whole `compute_loss`, with the metrics and trackers that `compile` makes."""
    model.compile(loss=sparse(), metrics=["accuracy"], weighted_metrics=["accuracy"])
    arrays = {"x": floats(6), "y": ids(3)} | ({"weights": floats()} if weighted else {})

    def loss_of(batch: Batch) -> Tensor:
        x, y = batch["x"], batch["y"]
        weights = ops.abs(batch["weights"]) if weighted else None
        predicted = model(x, training=True)
        loss = model.compute_loss(x, y, predicted, weights, training=True)
        model._loss_tracker.update_state(loss, sample_weight=ops.shape(x)[0])
        model.compute_metrics(x, y, predicted, weights)
        return loss

    rng = np.random.default_rng(0)
    batch = {name: ops.convert_to_tensor(array(2, 1, rng)) for name, array in arrays.items()}
    loss_of(batch)  # Keras makes the metrics of `compile` when it first sees a batch
    return Built((model,), loss_of, arrays, tuple(model.metrics))


@case("task")
def compute_loss_with_compiled_metrics() -> Built:
    model = mlp(3, layers.Dropout(0.3, seed=1), kernel_regularizer=keras.regularizers.L2(0.01))
    return _compiled(model, weighted=False)


@case("task")
def compute_loss_with_sample_weights() -> Built:
    return _compiled(mlp(3, layers.BatchNormalization()), weighted=True)


@case("task")
def embedding_bag() -> Built:
    model = chain((4,), layers.Embedding(11, 5), layers.Flatten(), layers.Dense(3), dtype="int32")
    return fit(model, sparse(), x=ids(11, 4), y=ids(3))


@case("task")
def factorisation_by_take() -> Built:
    """Two tables, gathered by the rows' ids, as in a recommender."""
    users, items = layers.Embedding(7, 4), layers.Embedding(9, 4)
    users.build(), items.build()

    def loss_of(batch: Batch) -> Tensor:
        u = ops.take(users.embeddings.value, batch["user"], axis=0)
        v = ops.take(items.embeddings.value, batch["item"], axis=0)
        return ops.mean(ops.square(ops.sum(u * v, axis=-1) - batch["rating"]))

    arrays = {"user": ids(7), "item": ids(9), "rating": floats()}
    return Built((users, items), loss_of, arrays)


@case("task")
def one_hot_features() -> Built:
    model = mlp()

    def loss_of(batch: Batch) -> Tensor:
        x = batch["x"] + ops.one_hot(batch["kind"], 6)
        return ops.mean(squared(batch["y"], model(x, training=True)))

    return own(model, loss_of, x=floats(6), kind=ids(6), y=floats(2))


@case("task")
def two_models() -> Built:
    """A generator and a critic in one loss."""
    generator, critic = mlp(6), mlp(1)

    def loss_of(batch: Batch) -> Tensor:
        made = generator(batch["z"], training=True)
        real = ops.softplus(-critic(batch["x"], training=True))
        return ops.mean(real) + ops.mean(ops.softplus(critic(made, training=True)))

    arrays = {"x": floats(6), "z": floats(6)}
    return Built((generator, critic), loss_of, arrays)
