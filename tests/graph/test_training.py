"""Models written as graphs train to the weights that `trainstep.Trainer` trains them to.

Both sides run the same operations on the same engine, fused by different programs. Ten steps of a
linear optimizer then differ by a few float32 roundings of 6e-8 each, 1e-6 in all; under Adam, which
divides by the size of the gradient, a rounding of a small gradient weighs more, 1e-5.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import trainstep as ts
from tests.helpers import assert_same, normal
from trainstep import graph

pytestmark = pytest.mark.slow  # `test_of_trainer.py` compares shorter runs

STEPS = 10
TOLERANCE = {"sgd": 1e-6, "adam": 1e-5}


def optimizer(name: str) -> Any:
    if name == "sgd":
        return keras.optimizers.SGD(0.1, momentum=0.5)
    return keras.optimizers.Adam(0.01)


def images(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A batch of rows with five features, and classes from 0 to 2."""
    return normal(8, 5, seed=seed), np.random.default_rng(seed).integers(0, 3, 8).astype("int32")


def sequences(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Six sequences of four steps with two features; the target is far off, so that it clips."""
    return normal(6, 4, 2, seed=seed), 5.0 * normal(6, 1, seed=seed + 500)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_softmax_regression(name: str) -> None:
    start = 0.1 * normal(5, 3)
    x = graph.placeholder("float32", [None, 5], name="x")
    y = graph.placeholder("int32", [None], name="y")
    w, b = graph.Variable(start, name="w"), graph.Variable(np.zeros(3, "float32"), name="b")
    logits = x @ w + b
    loss = ops.mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))
    mine = optimizer(name)
    train = graph.train.minimize(mine, loss)

    model = keras.Sequential([keras.Input((5,)), layers.Dense(3)])
    model.set_weights([start, np.zeros(3, "float32")])
    trainer = ts.Trainer(
        model, optimizer(name), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )

    with graph.Session() as session:
        for step in range(STEPS):
            rows, classes = images(step)
            value, _ = session.run([loss, train], feed_dict={x: rows, y: classes})
            logs = trainer.train_on_batch(rows, classes)
            np.testing.assert_allclose(value, logs["loss"], rtol=1e-5)  # a sum over the batch

    tolerance = TOLERANCE[name]
    assert_same([w.variable, b.variable], model.weights, rtol=tolerance, atol=tolerance)
    assert_same(mine.variables, trainer.optimizer.variables, rtol=tolerance, atol=tolerance)
    assert np.abs(w.numpy() - start).max() > 0.01  # it did train


@pytest.mark.parametrize("cell", [layers.SimpleRNN, layers.LSTM])
def test_a_recurrent_network_with_clipped_gradients(cell: Any) -> None:
    model = keras.Sequential([keras.Input((4, 2)), cell(3), layers.Dense(1)])
    start = model.get_weights()
    trainer = ts.Trainer(model, keras.optimizers.SGD(0.1), "mse", clip_norm=0.5)

    recurrent, last = cell(3), layers.Dense(1)
    x = graph.placeholder("float32", [None, 4, 2])
    y = graph.placeholder("float32", [None, 1])
    loss = ops.mean(keras.losses.mean_squared_error(y, last(recurrent(x))))
    weights = [*recurrent.trainable_variables, *last.trainable_variables]
    assert {id(v.variable) for v in graph.trainable_variables()} == {id(v) for v in weights}
    clipped, norm = graph.clip_by_global_norm(graph.gradients(loss, weights), 0.5)
    train = graph.train.apply_gradients(
        keras.optimizers.SGD(0.1), zip(clipped, weights, strict=True)
    )
    recurrent.set_weights(start[:-2])
    last.set_weights(start[-2:])

    norms = []
    session = graph.Session()
    for step in range(STEPS):
        rows, targets = sequences(step)
        value, size, _ = session.run([loss, norm, train], {x: rows, y: targets})
        logs = trainer.train_on_batch(rows, targets)
        np.testing.assert_allclose(value, logs["loss"], rtol=1e-5)  # a sum over the batch
        norms.append(size)

    assert max(norms) > 0.5  # some were clipped
    mine = [*recurrent.weights, *last.weights]
    assert_same(mine, model.weights, rtol=1e-6, atol=1e-6)


def test_a_model_with_dropout_and_normalization() -> None:
    """The masks are the same, for both sides draw from a generator of the same seed."""

    def build() -> keras.Model:
        keras.utils.set_random_seed(5)
        return keras.Sequential(
            [
                keras.Input((5,)),
                layers.Dense(4, activation="tanh"),
                layers.BatchNormalization(momentum=0.9),
                layers.Dropout(0.5, seed=7),
                layers.Dense(1),
            ]
        )

    theirs, mine = build(), build()
    trainer = ts.Trainer(theirs, keras.optimizers.SGD(0.1), "mse")
    x, y = graph.placeholder("float32", [None, 5]), graph.placeholder("float32", [None, 1])
    loss = ops.mean(keras.losses.mean_squared_error(y, mine(x, training=True)))
    train = graph.train.minimize(keras.optimizers.SGD(0.1), loss)

    session = graph.Session()
    for step in range(STEPS):
        rows, targets = normal(8, 5, seed=step), normal(8, 1, seed=step + 100)
        session.run([train, loss], {x: rows, y: targets})
        trainer.train_on_batch(rows, targets)

    # the variance of a batch is divided by: its roundings weigh more than those of sums
    assert_same(mine.weights, theirs.weights, rtol=1e-5, atol=1e-5)


def test_batches_of_two_sizes_and_a_callable_train_alike() -> None:
    weights = [graph.Variable(normal(5, 1)) for _ in range(2)]
    x, y = graph.placeholder("float32", [None, 5]), graph.placeholder("float32", [None, 1])
    losses = [ops.mean(keras.losses.mean_squared_error(y, x @ w)) for w in weights]
    first, second = [
        graph.train.minimize(keras.optimizers.SGD(0.1), loss, var_list=[w])
        for loss, w in zip(losses, weights, strict=True)
    ]

    session = graph.Session()
    step = session.make_callable([losses[1], second], feed_list=[x, y])
    for size in (8, 8, 5, 8, 5):
        rows, targets = normal(size, 5, seed=size), normal(size, 1, seed=size + 100)
        value, _ = session.run([losses[0], first], {x: rows, y: targets})
        np.testing.assert_allclose(step(rows, targets)[0], value, rtol=1e-6)

    assert_same([weights[0].numpy()], [weights[1].numpy()], rtol=1e-6, atol=1e-6)
