"""Sequences: recurrent networks, whose last state must not pass through the padded steps."""

from __future__ import annotations

import keras
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

T = ("x",)
TT = ("x", "y")


def last(*stack: layers.Layer) -> Built:
    """Four numbers a step to two numbers."""
    model = chain((None, 4), *stack, layers.Dense(2))
    return fit(model, losses.MeanSquaredError(), x=floats("t", 4), y=floats(2))


def each(*stack: layers.Layer) -> Built:
    """Four numbers a step to two numbers a step."""
    model = chain((None, 4), *stack, layers.Dense(2))
    return fit(model, losses.MeanSquaredError(), x=floats("t", 4), y=floats("t", 2))


def masked(*stack: layers.Layer) -> Built:
    """Sentences of differing lengths to three classes."""
    model = chain(
        (None,), layers.Embedding(11, 5, mask_zero=True), *stack, layers.Dense(3), dtype="int32"
    )
    accuracy = metrics.SparseCategoricalAccuracy()
    return fit(model, sparse(), [accuracy], x=tokens(11), y=ids(3))


add("lstm", "sequence", lambda: last(layers.LSTM(5)), timed=T)
add("gru", "sequence", lambda: last(layers.GRU(5)), timed=T)
add("gru_reset_before", "sequence", lambda: last(layers.GRU(5, reset_after=False)), timed=T)
add("simple_rnn", "sequence", lambda: last(layers.SimpleRNN(5)), timed=T)
add("lstm_go_backwards", "sequence", lambda: last(layers.LSTM(5, go_backwards=True)), timed=T)
add("lstm_each_step", "sequence", lambda: each(layers.LSTM(5, return_sequences=True)), timed=TT)
add(
    "gru_each_step_go_backwards",
    "sequence",
    lambda: each(layers.GRU(5, return_sequences=True, go_backwards=True)),
    timed=TT,
)
add("bidirectional_lstm", "sequence", lambda: last(layers.Bidirectional(layers.LSTM(4))), timed=T)
add(
    "bidirectional_gru_each_step",
    "sequence",
    lambda: each(layers.Bidirectional(layers.GRU(4, return_sequences=True), merge_mode="sum")),
    timed=TT,
)
add(
    "stacked_rnns",
    "sequence",
    lambda: last(layers.LSTM(5, return_sequences=True), layers.GRU(4)),
    timed=T,
)
add(
    "lstm_with_dropout",
    "sequence",
    lambda: last(layers.LSTM(5, dropout=0.3, recurrent_dropout=0.3, seed=1)),
    timed=T,
)
add(
    "rnn_of_stacked_cells",
    "sequence",
    lambda: last(layers.RNN([layers.GRUCell(4), layers.SimpleRNNCell(3)])),
    timed=T,
)
add("masked_lstm", "sequence", lambda: masked(layers.LSTM(5)), timed=T)
add("masked_gru", "sequence", lambda: masked(layers.GRU(5)), timed=T)
add(
    "masked_stack",
    "sequence",
    lambda: masked(layers.LSTM(5, return_sequences=True), layers.SimpleRNN(4)),
    timed=T,
)
add(
    "masked_bidirectional",
    "sequence",
    lambda: masked(layers.Bidirectional(layers.LSTM(4))),
    timed=T,
)
add("masked_average", "sequence", lambda: masked(layers.GlobalAveragePooling1D()), timed=T)
add("masking_layer", "sequence", lambda: last(layers.Masking(0.0), layers.LSTM(4)), timed=T)


@case("sequence", timed=("x",))
def conv_lstm_1d() -> Built:
    model = chain(
        (None, 6, 2), layers.ConvLSTM1D(3, 3, padding="same"), layers.Flatten(), layers.Dense(2)
    )
    return fit(model, losses.MeanSquaredError(), x=floats("t", 6, 2), y=floats(2))


@case("sequence", timed=("x", "y"))
def time_distributed() -> Built:
    return each(layers.TimeDistributed(layers.Dense(5, activation="tanh")))


@case("sequence", timed=("x",))
def time_distributed_conv() -> Built:
    inner = layers.TimeDistributed(layers.Conv1D(3, 3))
    model = chain((None, 6, 2), inner, layers.GlobalAveragePooling2D(), layers.Dense(2))
    return fit(model, losses.MeanSquaredError(), x=floats("t", 6, 2), y=floats(2))


@case("sequence", timed=("x", "past"))
def encoder_and_decoder() -> Built:
    """The decoder starts from the states of the encoder."""
    past, x = layers.Input((None, 4)), layers.Input((None, 4))
    _, *states = layers.LSTM(5, return_state=True)(past)
    model = keras.Model([past, x], layers.Dense(2)(layers.LSTM(5)(x, initial_state=states)))

    def loss_of(batch: Batch) -> Tensor:
        return ops.mean(squared(batch["y"], model([batch["past"], batch["x"]], training=True)))

    return own(model, loss_of, past=floats("t", 4), x=floats("t", 4), y=floats(2))


@case("sequence", timed=("x", "y"))
def scan_over_time() -> Built:
    """A recurrence written by hand."""
    model = chain((None, 4), layers.Dense(3, activation="tanh"))

    def move(carry: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        carry = 0.5 * carry + step
        return carry, carry

    def loss_of(batch: Batch) -> Tensor:
        steps = ops.transpose(model(batch["x"], training=True), (1, 0, 2))
        _, every = ops.scan(move, ops.zeros_like(steps[0]), steps)
        return ops.mean(squared(batch["y"], ops.transpose(every, (1, 0, 2))))

    return own(model, loss_of, x=floats("t", 4), y=floats("t", 3))


@case("sequence", timed=("x",), at_least=(1, 4))
def connectionist_temporal_classification() -> Built:
    model = chain(
        (None, 4), layers.Bidirectional(layers.LSTM(4, return_sequences=True)), layers.Dense(4)
    )
    labels = ids(3, 2)
    return fit(model, losses.CTC(), x=floats("t", 4), y=lambda n, t, rng: labels(n, t, rng) + 1)
