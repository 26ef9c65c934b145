"""Tasks that no single program can serve: the size is asked for in Python, or the rows are mixed
in a way that depends on all of them. They have to run at their exact shapes, and say why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
from keras import layers, losses, ops

from .base import Batch, Built, Tensor, add, case, chain, fit, floats, mlp, own, squared

# A question for the size that has two answers. JAX and torch answer it for the sizes at hand, and
# trace anew for a call that would be answered otherwise; TensorFlow has no size to answer with.
BRANCHED = {"tensorflow": "shape"}
# A question that has an answer for each size.
COUNTED = {"jax": "as a number", "tensorflow": "shape", "torch": ""}


def asking(change: Callable[[Tensor, Any], Tensor]) -> Callable[[], Built]:
    """A task that changes its errors by what Python makes of the number of rows."""

    def build() -> Built:
        model = mlp()

        def loss_of(batch: Batch) -> Tensor:
            errors = squared(batch["y"], model(batch["x"], training=True))
            return change(errors, batch["x"].shape[0])

        return own(model, loss_of, x=floats(6), y=floats(2))

    return build


def _branch(errors: Tensor, rows: Any) -> Tensor:
    return ops.mean(errors) if rows > 8 else ops.sum(errors)


def _alternation(errors: Tensor, rows: Any) -> Tensor:
    return ops.mean(errors) if rows % 2 == 0 else ops.sum(errors)


def _loop(errors: Tensor, rows: Any) -> Tensor:
    return sum(errors[i] / (i + 1) for i in range(rows))


add("python_if_on_the_size", "task", asking(_branch), refused=BRANCHED)
add("python_if_on_an_even_size", "task", asking(_alternation), refused=BRANCHED)
add("python_range_over_the_size", "task", asking(_loop), refused=COUNTED)
add(
    "int_of_the_size",
    "task",
    asking(lambda errors, rows: ops.sum(errors) / int(rows)),
    refused=COUNTED,
)


@case("task", refused={"jax": "shuffle"})
def shuffled_batch() -> Built:
    model, seed = mlp(), keras.random.SeedGenerator(7)

    def loss_of(batch: Batch) -> Tensor:
        x = 0.7 * batch["x"] + 0.3 * keras.random.shuffle(batch["x"], axis=0, seed=seed)
        return ops.mean(squared(batch["y"], model(x, training=True)))

    return Built((model,), loss_of, {"x": floats(6), "y": floats(2)}, others=(seed.state,))


@case("task", refused={"jax": "cholesky"})
def log_determinant_over_batch() -> Built:
    """A Gaussian process's evidence: the Cholesky factor of a matrix as large as the batch."""
    model = mlp(3)

    def loss_of(batch: Batch) -> Tensor:
        rows = model(batch["x"], training=True)
        kernel = ops.matmul(rows, ops.transpose(rows)) + ops.eye(ops.shape(rows)[0])
        return ops.mean(ops.log(ops.diagonal(ops.cholesky(kernel))))

    return own(model, loss_of, x=floats(6))


@case("task", unfit={"jax": "Keras cuts at a place that is a tensor, which JAX cannot compile"})
def random_crop() -> Built:
    crop = layers.RandomCrop(5, 5, seed=1)
    model = chain((8, 8, 2), crop, layers.Conv2D(3, 3), layers.Flatten(), layers.Dense(2))
    return fit(model, losses.MeanSquaredError(), x=floats(8, 8, 2), y=floats(2))


@case("task", refused={"jax": "permutation"})
def mix_up_layer() -> Built:
    model = chain((8, 8, 2), layers.MixUp(seed=1), layers.Conv2D(3, 3), layers.Flatten())
    return fit(model, lambda y, p: ops.mean(squared(y, p[:, :2])), x=floats(8, 8, 2), y=floats(2))


@case("task", refused={"jax": "permutation"})
def cut_mix_layer() -> Built:
    model = chain((8, 8, 2), layers.CutMix(seed=1), layers.Conv2D(3, 3), layers.Flatten())
    return fit(model, lambda y, p: ops.mean(squared(y, p[:, :2])), x=floats(8, 8, 2), y=floats(2))


@case("sequence", timed=("x",), rows=5, refused={"jax": "LSTM", "torch": ""})
def stateful_lstm() -> Built:
    """The state has a row for each row of the batch, so that the batch can have only one size."""
    x = layers.Input(batch_shape=(5, None, 4))
    lstm = layers.LSTM(5, stateful=True)
    model = keras.Model(x, layers.Dense(2)(lstm(x)))
    built = fit(model, losses.MeanSquaredError(), x=floats("t", 4), y=floats(2))
    return replace(built, others=tuple(lstm.states))  # Keras does not count them as the model's


@case("sequence", timed=("x",), refused={"tensorflow": "shape"})
def flatten_over_time() -> Built:
    """As many weights are taken from a table as there are steps times features."""
    table = layers.Embedding(100, 2)
    table.build()

    def loss_of(batch: Batch) -> Tensor:
        flat = layers.Flatten()(batch["x"])
        kernel = ops.take(table.embeddings.value, ops.arange(flat.shape[1]), axis=0)
        return ops.mean(squared(batch["y"], ops.matmul(flat, kernel)))

    return own(table, loss_of, x=floats("t", 4), y=floats(2))


@case("sequence", timed=("x",), refused={"jax": "fft"})
def fourier_transform_over_time() -> Built:
    model = chain((None, 4), layers.Dense(3))

    def loss_of(batch: Batch) -> Tensor:
        h = ops.transpose(model(batch["x"], training=True), (0, 2, 1))
        real, imaginary = ops.fft((h, ops.zeros_like(h)))
        return ops.mean(ops.square(real) + ops.abs(imaginary))

    return own(model, loss_of, x=floats("t", 4))
