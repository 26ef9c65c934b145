"""Sequences: convolution, pooling and resampling over time, where windows reach past the end."""

from __future__ import annotations

from keras import layers, losses

from .base import Built, add, case, chain, fit, floats
from .recurrent import each, last


def pooled(*stack: layers.Layer) -> Built:
    """The layers, then the maximum over what is left of time."""
    return last(layers.Dense(5), *stack, layers.GlobalMaxPooling1D())


def averaged(*stack: layers.Layer) -> Built:
    """The layers, then the average."""
    return last(layers.Dense(5), *stack, layers.GlobalAveragePooling1D())


def _add(name: str, build: object, **more: object) -> None:
    # Windows of three, or two with strides, need a few steps to be there.
    add(name, "sequence", build, timed=("x",), at_least=(1, 4), **more)


_add("conv1d_same", lambda: averaged(layers.Conv1D(4, 3, padding="same", activation="relu")))
_add("conv1d_causal", lambda: averaged(layers.Conv1D(4, 3, padding="causal")))
_add("conv1d_valid", lambda: averaged(layers.Conv1D(4, 3, padding="valid")))
_add("conv1d_pointwise", lambda: pooled(layers.Conv1D(4, 1, activation="tanh")))
_add("conv1d_strided", lambda: averaged(layers.Conv1D(4, 3, strides=2)))
_add("conv1d_strided_same", lambda: averaged(layers.Conv1D(4, 3, strides=2, padding="same")))
_add("conv1d_dilated", lambda: averaged(layers.Conv1D(4, 2, dilation_rate=2)))
_add(
    "conv1d_dilated_causal",
    lambda: averaged(layers.Conv1D(4, 3, dilation_rate=2, padding="causal")),
)
_add(
    "conv1d_twice",
    lambda: pooled(layers.Conv1D(4, 3, padding="same"), layers.Conv1D(3, 3, padding="same")),
)
_add("separable_conv1d", lambda: averaged(layers.SeparableConv1D(4, 3, padding="same")))
_add("depthwise_conv1d", lambda: averaged(layers.DepthwiseConv1D(3, padding="same")))
_add("conv1d_transpose", lambda: averaged(layers.Conv1DTranspose(3, 3, padding="same")))
_add("conv1d_transpose_strided", lambda: averaged(layers.Conv1DTranspose(3, 3, strides=2)))
_add("max_pooling1d", lambda: averaged(layers.MaxPooling1D(2)))
_add("max_pooling1d_same", lambda: averaged(layers.MaxPooling1D(3, 2, padding="same")))
_add("max_pooling1d_overlapping", lambda: averaged(layers.MaxPooling1D(3, 1, padding="same")))
_add("average_pooling1d", lambda: pooled(layers.AveragePooling1D(2)))
_add("average_pooling1d_same", lambda: pooled(layers.AveragePooling1D(3, 2, padding="same")))
_add("global_max_pooling1d", lambda: pooled(layers.Dense(4, activation="tanh")))
_add("global_average_pooling1d", lambda: averaged(layers.Dense(4, activation="tanh")))
_add("up_sampling1d", lambda: averaged(layers.UpSampling1D(2), layers.Conv1D(3, 2)))
_add("zero_padding1d", lambda: averaged(layers.ZeroPadding1D(2), layers.Conv1D(3, 2)))
_add("cropping1d", lambda: pooled(layers.Cropping1D((1, 1))))
_add(
    "batch_norm_over_time", lambda: averaged(layers.BatchNormalization(momentum=0.7), layers.ReLU())
)
_add("layer_norm_over_time", lambda: pooled(layers.LayerNormalization()))
_add("group_norm_over_time", lambda: pooled(layers.Dense(4), layers.GroupNormalization(2)))
_add("unit_norm_over_time", lambda: pooled(layers.UnitNormalization()))
_add("dropout_over_time", lambda: averaged(layers.Dropout(0.4, seed=1), layers.Dense(3, "tanh")))
_add(
    "spatial_dropout1d",
    lambda: averaged(layers.SpatialDropout1D(0.4, seed=1), layers.Dense(3, "tanh")),
)
_add(
    "gaussian_noise_over_time",
    lambda: averaged(layers.GaussianNoise(0.3, seed=1), layers.Dense(3, "tanh")),
)


@case("sequence", timed=("x", "y"), at_least=(1, 4))
def conv_then_lstm() -> Built:
    conv = layers.Conv1D(4, 3, padding="causal")
    return each(conv, layers.BatchNormalization(), layers.LSTM(4, return_sequences=True))


@case("sequence", timed=("x",), at_least=(1, 4))
def conv2d_over_time_and_pitch() -> Built:
    """A spectrogram: one axis of the image is time."""
    conv = layers.Conv2D(3, 3, padding="same", activation="relu")
    pool = layers.MaxPooling2D((1, 2))
    model = chain((None, 6, 1), conv, pool, layers.GlobalAveragePooling2D(), layers.Dense(2))
    return fit(model, losses.MeanSquaredError(), x=floats("t", 6, 1), y=floats(2))
