"""Sequences: attention, language models and positions, where each step sees every other."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, losses, metrics, ops

from .base import (
    Batch,
    Built,
    Tensor,
    add,
    case,
    chain,
    fit,
    floats,
    ids,
    own,
    sparse,
    squared,
    tokens,
)


def attending(make: type[layers.Layer], *arguments: object, **call: object) -> Built:
    """Self-attention, then an average over time."""
    x = layers.Input((None, 4))
    h = layers.Dense(6)(x)
    h = make(*arguments)(h, h, **call)
    model = keras.Model(x, layers.Dense(2)(layers.GlobalAveragePooling1D()(h)))
    return fit(model, losses.MeanSquaredError(), x=floats("t", 4), y=floats(2))


def attending_as_list(layer: layers.Layer, **call: object) -> Built:
    """The same for the layers that take queries and values as a list."""
    x = layers.Input((None, 4))
    h = layers.Dense(6)(x)
    h = layer([h, layers.Dense(6)(x)], **call)
    model = keras.Model(x, layers.Dense(2)(layers.GlobalAveragePooling1D()(h)))
    return fit(model, losses.MeanSquaredError(), x=floats("t", 4), y=floats(2))


def _add(name: str, build: object) -> None:
    add(name, "sequence", build, timed=("x",))


_add("multi_head_attention", lambda: attending(layers.MultiHeadAttention, 2, 3))
_add(
    "causal_multi_head_attention",
    lambda: attending(layers.MultiHeadAttention, 2, 3, use_causal_mask=True),
)
_add("group_query_attention", lambda: attending(layers.GroupQueryAttention, 3, 4, 2))
_add("attention", lambda: attending_as_list(layers.Attention(use_scale=True)))
_add("causal_attention", lambda: attending_as_list(layers.Attention(), use_causal_mask=True))
_add("additive_attention", lambda: attending_as_list(layers.AdditiveAttention()))


@case("sequence", timed=("x",))
def masked_attention() -> Built:
    x = layers.Input((None,), dtype="int32")
    h = layers.Embedding(11, 6, mask_zero=True)(x)
    h = layers.MultiHeadAttention(2, 3, dropout=0.2, seed=1)(h, h)
    model = keras.Model(x, layers.Dense(3)(layers.GlobalAveragePooling1D()(h)))
    return fit(model, sparse(), x=tokens(11), y=ids(3))


@case("sequence", timed=("x", "memory"))
def cross_attention() -> Built:
    x, memory = layers.Input((None, 4)), layers.Input((None, 5))
    h = layers.MultiHeadAttention(2, 3)(layers.Dense(6)(x), layers.Dense(6)(memory))
    model = keras.Model([x, memory], layers.Dense(2)(layers.GlobalMaxPooling1D()(h)))

    def loss_of(batch: Batch) -> Tensor:
        return ops.mean(squared(batch["y"], model([batch["x"], batch["memory"]], training=True)))

    return own(model, loss_of, x=floats("t", 4), memory=floats("t", 5), y=floats(2))


def _block(h: Tensor) -> Tensor:
    """A transformer's block, with dropout."""
    seen = layers.MultiHeadAttention(2, 4)(h, h, use_causal_mask=True)
    h = layers.LayerNormalization()(h + seen)
    wide = layers.Dense(8, activation="gelu")(h)
    return layers.Dropout(0.2, seed=2)(layers.LayerNormalization()(h + layers.Dense(8)(wide)))


@case("sequence", timed=("x", "y"))
def causal_language_model() -> Built:
    """The next word of sentences of differing lengths, a loss for each word."""
    x = layers.Input((None,), dtype="int32")
    model = keras.Model(x, layers.Dense(11)(_block(layers.Embedding(11, 8, mask_zero=True)(x))))
    accuracy = metrics.SparseCategoricalAccuracy()
    return fit(model, sparse(), [accuracy], x=tokens(11), y=ids(11, "t"))


@case("sequence", timed=("x",), at_least=(1, 2))
def language_model_that_shifts_by_one() -> Built:
    """Targets are the inputs one step later, cut inside the step; the loss is weighed by length."""
    x = layers.Input((None,), dtype="int32")
    model = keras.Model(x, layers.Dense(11)(_block(layers.Embedding(11, 8)(x))))
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def loss_of(batch: Batch) -> Tensor:
        words = batch["x"]
        real = ops.cast(words[:, 1:] != 0, "float32")
        errors = loss(words[:, 1:], model(words[:, :-1], training=True))
        return ops.sum(errors * real) / (ops.sum(real) + 1)

    return own(model, loss_of, x=tokens(11))


class Positions(layers.Layer):
    """Adds waves of the step's number."""

    def call(self, x: Tensor) -> Tensor:
        number = ops.cast(ops.arange(ops.shape(x)[1]), "float32")[:, None]
        rate = ops.convert_to_tensor(np.array([1.0, 0.3, 0.1, 0.03], "float32"))
        return x + ops.sin(number * rate)


class LearntPositions(layers.Layer):
    """Adds a row of a table for each step."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.table = self.add_weight(shape=(64, shape[-1]), initializer="normal", name="table")

    def call(self, x: Tensor) -> Tensor:
        return x + ops.take(self.table, ops.arange(ops.shape(x)[1]), axis=0)


def _positioned(layer: layers.Layer) -> Built:
    model = chain(
        (None, 4), layer, layers.Dense(4, "tanh"), layers.GlobalMaxPooling1D(), layers.Dense(2)
    )
    return fit(model, losses.MeanSquaredError(), x=floats("t", 4), y=floats(2))


_add("positional_encoding", lambda: _positioned(Positions()))
_add("learnt_positions", lambda: _positioned(LearntPositions()))


@case("sequence", timed=("x",))
def rotary_positions() -> Built:
    """Queries and keys turned by an angle that grows with the step."""
    model = chain((None, 4), layers.Dense(4))

    def turned(h: Tensor) -> Tensor:
        angle = ops.cast(ops.arange(ops.shape(h)[1]), "float32")[:, None] * 0.3
        even, odd = h[..., :2], h[..., 2:]
        rotated = [even * ops.cos(angle) - odd * ops.sin(angle)]
        rotated.append(even * ops.sin(angle) + odd * ops.cos(angle))
        return ops.concatenate(rotated, axis=-1)

    def loss_of(batch: Batch) -> Tensor:
        h = model(batch["x"], training=True)
        scores = ops.einsum("nqd,nkd->nqk", turned(h), turned(h))
        seen = ops.einsum("nqk,nkd->nqd", ops.softmax(scores, axis=-1), h)
        return ops.mean(squared(batch["y"], ops.mean(seen, axis=1)))

    return own(model, loss_of, x=floats("t", 4), y=floats(4))


@case("sequence", timed=("x",))
def relative_position_bias() -> Built:
    """A bias by the distance of two steps, from a table, under a triangular mask."""
    model, bias = chain((None, 4), layers.Dense(4)), layers.Embedding(9, 1)
    bias.build()

    def loss_of(batch: Batch) -> Tensor:
        h = model(batch["x"], training=True)
        steps = ops.arange(ops.shape(h)[1])
        apart = steps[:, None] - steps[None, :]
        scores = ops.matmul(h, ops.transpose(h, (0, 2, 1)))
        scores += ops.take(bias.embeddings.value[:, 0], ops.clip(apart, -4, 4) + 4, axis=0)
        scores = ops.where(apart >= 0, scores, -1e9)
        return ops.mean(squared(batch["y"], ops.matmul(ops.softmax(scores), h)[:, -1]))

    return Built((model, bias), loss_of, {"x": floats("t", 4), "y": floats(4)})
