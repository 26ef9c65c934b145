"""Single layers, each in a training step: a scale, the layer, and a weighted sum of each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from .base import Array, Batch, Built, Tensor, add, chain, fit, floats, ids, own, squared, uniform


class Scale(layers.Layer):
    """A weight and a bias for each channel, so that gradients have to pass the layer after it."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.weight = self.add_weight(shape=shape[-1:], initializer="ones", name="weight")
        self.bias = self.add_weight(shape=shape[-1:], initializer="zeros", name="bias")

    def call(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


class RowSum(layers.Layer):
    """A sum over each row in which every place has another weight, so that none may move."""

    def call(self, x: Tensor) -> Tensor:
        x = ops.cast(x, "float32")
        sizes = tuple(x.shape[1:])
        if not sizes:
            return x
        places = int(np.prod(sizes))
        weights = np.cos(np.arange(places)).reshape(sizes).astype("float32") / places**0.5
        return ops.sum(x * ops.convert_to_tensor(weights), axis=tuple(range(1, 1 + len(sizes))))


def _error(y: Tensor, predicted: Tensor) -> Tensor:
    return ops.mean(ops.square(y - predicted))


def passing(make: Callable[[], Any], shape: Sequence[int], x: Array | None = None) -> Built:
    """The layer between a scale and the sum."""
    model = chain(shape, Scale(), make(), RowSum())
    return fit(model, _error, x=x or floats(*shape), y=floats())


def merging(make: Callable[[], Any]) -> Built:
    """A layer of two inputs."""
    left, right = layers.Input((4,)), layers.Input((4,))
    model = keras.Model([left, right], RowSum()(make()([Scale()(left), Scale()(right)])))

    def loss_of(batch: Batch) -> Tensor:
        return _error(batch["y"], model([batch["left"], batch["right"]], training=True))

    return own(model, loss_of, left=floats(4), right=floats(4), y=floats())


def preparing(make: Callable[[], Any], x: Array, shape: Sequence[int], dtype: str) -> Built:
    """A layer that prepares data and has no gradient of its own: trained is what comes after."""
    layer, head = make(), layers.Dense(2)
    features = chain(shape, layer, layers.Flatten(), dtype=dtype)
    width = features.output_shape[-1]
    head.build((None, width))

    def loss_of(batch: Batch) -> Tensor:
        prepared = ops.cast(features(batch["x"], training=True), "float32")
        return ops.mean(squared(batch["y"], head(prepared)))

    return Built((head, features), loss_of, {"x": x, "y": floats(2)})


def adapted(layer: layers.Layer, *shape: int) -> layers.Layer:
    """A layer that has seen data."""
    layer.adapt(np.random.default_rng(0).standard_normal((32, *shape)).astype("float32"))
    return layer


ROW, STEPS, IMAGE, VIDEO = (4,), (6, 4), (6, 6, 2), (4, 4, 4, 2)

PLAIN: dict[str, tuple[Callable[[], Any], Sequence[int]]] = {
    **{
        f"dense_{name}": ((lambda name=name: layers.Dense(5, activation=name)), ROW)
        for name in ("relu", "softmax", "gelu", "swish", "softplus", "hard_sigmoid", "exponential")
    },
    "einsum_dense": (lambda: layers.EinsumDense("btd,de->bte", (6, 5), bias_axes="e"), STEPS),
    "dense_low_rank": (lambda: layers.Dense(5, use_bias=False, kernel_constraint="unit_norm"), ROW),
    "identity": (layers.Identity, ROW),
    "lambda": (lambda: layers.Lambda(lambda x: ops.tanh(x) + 1), ROW),
    "activation": (lambda: layers.Activation("selu"), ROW),
    "elu": (layers.ELU, ROW),
    "leaky_relu": (layers.LeakyReLU, ROW),
    "prelu": (layers.PReLU, ROW),
    "relu_capped": (lambda: layers.ReLU(1.5, 0.1, 0.2), ROW),
    "softmax": (layers.Softmax, STEPS),
    "softmax_over_steps": (lambda: layers.Softmax(axis=1), STEPS),
    "rescaling": (lambda: layers.Rescaling(0.5, 1.0), ROW),
    "permute": (lambda: layers.Permute((2, 1)), STEPS),
    "repeat_vector": (lambda: layers.RepeatVector(3), ROW),
    "reshape": (lambda: layers.Reshape((3, 8)), STEPS),
    "reshape_unknown": (lambda: layers.Reshape((-1, 2)), STEPS),
    "flatten": (layers.Flatten, IMAGE),
    "normalization": (lambda: adapted(layers.Normalization(), 4), ROW),
    "batch_normalization_of_steps": (lambda: layers.BatchNormalization(axis=1), STEPS),
    "layer_normalization_of_all": (lambda: layers.LayerNormalization(axis=(1, 2)), STEPS),
    "rms_normalization": (lambda: layers.RMSNormalization(), ROW),
    "unit_normalization": (layers.UnitNormalization, ROW),
    "spectral_normalization": (lambda: layers.SpectralNormalization(layers.Dense(3)), ROW),
    "activity_regularization": (lambda: layers.ActivityRegularization(0.1, 0.1), ROW),
    "spatial_dropout1d_of_steps": (lambda: layers.SpatialDropout1D(0.4, seed=1), STEPS),
    "dropout_with_noise_shape": (lambda: layers.Dropout(0.4, (None, 1, 4), seed=1), STEPS),
    "cropping2d": (lambda: layers.Cropping2D(1), IMAGE),
    "zero_padding2d": (lambda: layers.ZeroPadding2D(1), IMAGE),
    "up_sampling2d": (layers.UpSampling2D, IMAGE),
    "up_sampling2d_bilinear": (lambda: layers.UpSampling2D(interpolation="bilinear"), IMAGE),
    "resizing": (lambda: layers.Resizing(4, 5), IMAGE),
    "center_crop": (lambda: layers.CenterCrop(4, 4), IMAGE),
    "max_pooling3d": (layers.MaxPooling3D, VIDEO),
    "average_pooling3d": (lambda: layers.AveragePooling3D(2), VIDEO),
    "adaptive_pooling": (lambda: layers.AdaptiveAveragePooling2D(3), IMAGE),
    "conv1d_of_steps": (lambda: layers.Conv1D(3, 3), STEPS),
    "conv2d_same": (lambda: layers.Conv2D(3, 3, padding="same"), IMAGE),
    "conv2d_transpose": (lambda: layers.Conv2DTranspose(3, 3, strides=2), IMAGE),
    "conv3d": (lambda: layers.Conv3D(2, 2), VIDEO),
    "conv3d_transpose": (lambda: layers.Conv3DTranspose(2, 2), VIDEO),
    "separable_conv2d": (lambda: layers.SeparableConv2D(3, 3), IMAGE),
    "lstm_of_steps": (lambda: layers.LSTM(4), STEPS),
    "unrolled_gru": (lambda: layers.GRU(4, unroll=True), STEPS),
    "time_distributed_dense": (lambda: layers.TimeDistributed(layers.Dense(3)), STEPS),
    "conv_lstm2d": (lambda: layers.ConvLSTM2D(2, 3, padding="same"), VIDEO),
    "global_max_pooling3d": (layers.GlobalMaxPooling3D, VIDEO),
    "random_flip": (lambda: layers.RandomFlip(seed=1), IMAGE),
    "random_rotation": (lambda: layers.RandomRotation(0.2, seed=1), IMAGE),
    "random_zoom": (lambda: layers.RandomZoom(0.2, seed=1), IMAGE),
    "random_translation": (lambda: layers.RandomTranslation(0.2, 0.2, seed=1), IMAGE),
    "random_contrast": (lambda: layers.RandomContrast(0.4, value_range=(0, 1), seed=1), IMAGE),
    "random_brightness": (lambda: layers.RandomBrightness(0.4, value_range=(0, 1), seed=1), IMAGE),
    "random_erasing": (lambda: layers.RandomErasing(value_range=(0, 1), seed=1), IMAGE),
}

MERGES: dict[str, Callable[[], Any]] = {
    "add": layers.Add,
    "subtract": layers.Subtract,
    "multiply": layers.Multiply,
    "average": layers.Average,
    "maximum": layers.Maximum,
    "minimum": layers.Minimum,
    "concatenate": layers.Concatenate,
    "dot": lambda: layers.Dot(axes=-1, normalize=True),
}

# Of each: how it is made, the data, the shape of a row, and the dtype.
PREPARATIONS: dict[str, tuple[Callable[[], Any], Array, Sequence[int], str]] = {
    "category_encoding": (lambda: layers.CategoryEncoding(5), ids(5, 3), (3,), "int32"),
    "category_counts": (
        lambda: layers.CategoryEncoding(5, output_mode="count"),
        ids(5, 3),
        (3,),
        "int32",
    ),
    "discretization": (
        lambda: layers.Discretization(bin_boundaries=[-0.5, 0.0, 0.5]),
        floats(4),
        (4,),
        "float32",
    ),
    "adapted_discretization": (
        lambda: adapted(layers.Discretization(num_bins=4), 4),
        floats(4),
        (4,),
        "float32",
    ),
    "hashing": (lambda: layers.Hashing(7), ids(50, 4), (4,), "int32"),
    "mel_spectrogram": (
        lambda: layers.MelSpectrogram(16, 8, sampling_rate=100, num_mel_bins=4, min_freq=1),
        floats(64),
        (64,),
        "float32",
    ),
}

UNFIT: dict[str, dict[str, str]] = {
    "hashing": {"jax": "Keras computes it with TensorFlow, from values that a trace does not have"},
}


def _more(name: str) -> dict[str, Any]:
    return {"unfit": UNFIT.get(name, {})}


for _name, (_make, _shape) in PLAIN.items():
    _x = uniform(*_shape) if _name.startswith("random") else None
    _build = lambda make=_make, shape=_shape, x=_x: passing(make, shape, x)  # noqa: E731
    add(f"layer_{_name}", "layer", _build, **_more(_name))
for _name, _make in MERGES.items():
    add(f"layer_{_name}", "layer", lambda make=_make: merging(make), **_more(_name))
for _name, _row in PREPARATIONS.items():
    add(f"layer_{_name}", "layer", lambda row=_row: preparing(*row), **_more(_name))


def _embedding() -> Built:
    model = chain((3,), layers.Embedding(7, 4), RowSum(), dtype="int32")
    return fit(model, _error, x=ids(7, 3), y=floats())


def _tied_embedding() -> Built:
    """A table that is also the last layer, read backwards."""
    x = layers.Input((3,), dtype="int32")
    table = layers.ReversibleEmbedding(7, 4)
    model = keras.Model(x, RowSum()(table(layers.Dense(4)(table(x)), reverse=True)))
    return fit(model, _error, x=ids(7, 3), y=floats())


add("layer_embedding", "layer", _embedding)
add("layer_reversible_embedding", "layer", _tied_embedding)
