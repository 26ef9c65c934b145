"""The three engines compute the same numbers: each agrees with NumPy in float64.

Nothing is compared between processes. If every engine stays within a tolerance of one float64
reference, any two of them are within twice that tolerance of one another.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import trainstep as ts
from tests.helpers import host, normal

STEPS = 20
BATCH = 16
RATE, BETA_1, BETA_2, EPSILON = 0.01, 0.9, 0.999, 1e-7  # Keras's defaults but the rate

# float32 roundings (6e-8) of sums over 16 rows and 10 columns, through two layers. The largest
# gradient is the scale: a small entry is the difference of larger numbers.
GRADIENT = 2e-6
# Adam divides by the gradient's size, so a weight's relative error is that of its gradient, 20 times.
TRAINED = 2e-5


def initial() -> list[np.ndarray]:
    """Two layers, 5-10-2, every weight away from zero."""
    return [normal(5, 10, seed=1), normal(10, seed=2), normal(10, 2, seed=3), normal(2, seed=4)]


def batch(i: int) -> tuple[np.ndarray, np.ndarray]:
    return normal(BATCH, 5, seed=100 + i), normal(BATCH, 2, seed=200 + i)


def numpy_loss(w: list[np.ndarray], x: np.ndarray, y: np.ndarray) -> tuple[Any, list[np.ndarray]]:
    """Mean squared error of tanh(x W + b) V + c, and its gradients, by hand."""
    hidden = np.tanh(x @ w[0] + w[1])
    error = hidden @ w[2] + w[3] - y
    d_out = 2 * error / error.size
    d_hidden = (d_out @ w[2].T) * (1 - hidden**2)
    return np.mean(error**2), [x.T @ d_hidden, d_hidden.sum(0), hidden.T @ d_out, d_out.sum(0)]


def numpy_training() -> tuple[np.ndarray, list[np.ndarray]]:
    """The losses of Adam in float64, and the weights it ends with."""
    w = [a.astype("float64") for a in initial()]
    m, v = [np.zeros_like(a) for a in w], [np.zeros_like(a) for a in w]
    losses = []
    for t in range(1, STEPS + 1):
        x, y = (a.astype("float64") for a in batch(t))
        loss, gradients = numpy_loss(w, x, y)
        losses.append(loss)
        alpha = RATE * np.sqrt(1 - BETA_2**t) / (1 - BETA_1**t)
        for i, g in enumerate(gradients):
            m[i] += (g - m[i]) * (1 - BETA_1)
            v[i] += (g * g - v[i]) * (1 - BETA_2)
            w[i] = w[i] - alpha * m[i] / (np.sqrt(v[i]) + EPSILON)
    return np.array(losses), w


def mlp() -> keras.Model:
    model = keras.Sequential(
        [keras.Input((5,)), layers.Dense(10, activation="tanh"), layers.Dense(2)]
    )
    model.set_weights(initial())
    return model


def mean_squared_error(model: keras.Model, x: Any, y: Any) -> Any:
    return ops.mean(ops.square(model(x, training=True) - y))


@pytest.mark.parametrize("compiled", [True, False], ids=["inside_function", "outside_function"])
def test_gradients_agree_with_float64(compiled: bool) -> None:
    model = mlp()
    x, y = batch(0)
    wanted_loss, wanted = numpy_loss(
        [a.astype("float64") for a in initial()], x.astype("float64"), y.astype("float64")
    )

    def loss_and_gradients(x: Any, y: Any) -> Any:
        return ts.value_and_grad(
            lambda: mean_squared_error(model, x, y), model.trainable_variables
        )()

    if compiled:
        loss_and_gradients = ts.function(loss_and_gradients)
    loss, gradients = loss_and_gradients(ops.convert_to_tensor(x), ops.convert_to_tensor(y))

    np.testing.assert_allclose(float(host(loss)), wanted_loss, rtol=GRADIENT)
    for g, w in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(host(g), w, rtol=0, atol=GRADIENT * np.abs(w).max())


def test_gradients_by_argument_agree_with_float64() -> None:
    w = initial()
    x, y = batch(0)
    _, wanted = numpy_loss([a.astype("float64") for a in w], x.astype("float64"), y)

    @ts.function
    def gradients_at(w: Any, x: Any, y: Any) -> Any:
        def loss(w: Any) -> Any:
            hidden = ops.tanh(ops.matmul(x, w[0]) + w[1])
            return ops.mean(ops.square(ops.matmul(hidden, w[2]) + w[3] - y))

        return ts.grad(loss, argnums=0)(w)

    for g, expected in zip(gradients_at(w, x, y), wanted, strict=True):
        np.testing.assert_allclose(
            host(g), expected, rtol=0, atol=GRADIENT * np.abs(expected).max()
        )


def test_twenty_steps_of_adam_agree_with_float64() -> None:
    model = mlp()
    optimizer = keras.optimizers.Adam(RATE)

    @ts.function(max_traces=1)
    def step(x: Any, y: Any) -> Any:
        loss, gradients = ts.value_and_grad(
            lambda: mean_squared_error(model, x, y), model.trainable_variables
        )()
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    losses = [float(host(step(*batch(t)))) for t in range(1, STEPS + 1)]

    wanted_losses, wanted_weights = numpy_training()
    np.testing.assert_allclose(losses, wanted_losses, rtol=TRAINED)
    for variable, wanted in zip(model.trainable_variables, wanted_weights, strict=True):
        np.testing.assert_allclose(host(variable), wanted, rtol=0, atol=TRAINED)
