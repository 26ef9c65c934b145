"""Expressions: random numbers, Python functions, operators and slices, Keras layers and losses.

1e-6 is for a handful of float32 operations, each of which rounds at 6e-8.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from tests.helpers import host, normal
from trainstep import graph

ROUNDING = {"rtol": 1e-6, "atol": 1e-6}


def run(fetches: Any, feed_dict: Any = None) -> Any:
    return graph.Session().run(fetches, feed_dict)


# Random numbers

DRAWS = [graph.random_normal, pytest.param(graph.random_uniform, marks=pytest.mark.slow)]


@pytest.mark.parametrize("draw", DRAWS)
def test_random_numbers_are_drawn_anew_at_every_run(draw: Any) -> None:
    numbers, others = draw([5]), draw([5])
    session = graph.Session()

    a, same, b = session.run([numbers, numbers * 1.0, others])
    c = session.run(numbers)

    np.testing.assert_array_equal(a, same)  # one draw in a run
    assert a.shape == (5,)
    assert not np.array_equal(a, b)
    assert not np.array_equal(a, c)


@pytest.mark.parametrize("draw", DRAWS)
def test_a_seed_gives_the_same_sequence_again(draw: Any) -> None:
    sequences = []
    for seed in (7, 7, 8):
        with graph.Graph().as_default() as inside:
            numbers = draw([4], seed=seed)
            session = graph.Session(graph=inside)
            sequences.append([session.run(numbers) for _ in range(2)])
    one, again, other = sequences

    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one[0], one[1])
    assert not np.array_equal(one, other)


def test_random_numbers_have_the_moments_and_bounds_asked_for() -> None:
    n = graph.random_normal([2000], mean=3.0, stddev=0.5, seed=1)
    u = graph.random_uniform([2000], minval=-1.0, maxval=2.0, seed=2)
    a, b = run([n, u])

    # the mean of 2000 lies within 5 of its deviations, 0.5 / sqrt(2000), and so does the deviation
    assert abs(a.mean() - 3.0) < 0.06
    assert abs(a.std() - 0.5) < 0.05
    assert b.min() >= -1.0
    assert b.max() <= 2.0
    assert b.max() - b.min() > 2.9


# Python functions, operators, layers, losses


def test_call_makes_a_node_of_any_function() -> None:
    x = graph.placeholder("float32", [None])
    seeds = keras.random.SeedGenerator(3)

    def noisy(a: Any, b: Any) -> Any:
        return ops.where(a > b, a, b) + 0.0 * keras.random.normal(ops.shape(a), seed=seeds)

    larger = graph.call(noisy, x, graph.constant(2.0), name="larger")

    np.testing.assert_array_equal(run(larger, {x: [1.0, 3.0]}), [2.0, 3.0])
    np.testing.assert_array_equal(run("larger", {x: [4.0]}), [4.0])


def test_call_with_random_numbers_draws_anew() -> None:
    seeds = keras.random.SeedGenerator(3)
    noise = graph.call(lambda a: a + keras.random.normal((4,), seed=seeds), graph.constant(0.0))
    session = graph.Session()

    assert not np.array_equal(session.run(noise), session.run(noise))


OPERATORS = {
    "plus": lambda a, b: a + b,
    "minus": lambda a, b: 1 - a - b,
    "times": lambda a, b: 2 * a * b,
    "over": lambda a, b: 1 / a + b / 4,
    "power": lambda a, b: a**2 - -b,
    "matrix": lambda a, b: a @ b,
    "row": lambda a, b: a[0] + b[1],
    "block": lambda a, b: a[:, 1:] * b[:1],
    "last": lambda a, b: a[..., -1] + b[-1],
    "absolute": lambda a, b: abs(a - b),
    "compared": lambda a, b: a > b,
}


def test_operators_and_slices_are_those_of_numpy() -> None:
    a, b = normal(2, 2, seed=1), normal(2, 2, seed=2)
    x, v = graph.placeholder("float32", [None, 2]), graph.Variable(b)

    values = run({name: op(x, v) for name, op in OPERATORS.items()}, {x: a})
    swapped = run({name: op(v, x) for name, op in OPERATORS.items()}, {x: a})

    for name, op in OPERATORS.items():
        np.testing.assert_allclose(values[name], op(a, b), **ROUNDING, err_msg=name)
        np.testing.assert_allclose(swapped[name], op(b, a), **ROUNDING, err_msg=name)


def test_variables_alone_make_expressions() -> None:
    v, w = graph.Variable([1.0, 2.0]), graph.Variable([3.0, 4.0])

    assert run(ops.sum(v * w)) == 11.0
    np.testing.assert_array_equal(run(v[1:] + w[:1]), [5.0])


def test_layers_and_models_give_what_keras_gives() -> None:
    dense = layers.Dense(3, activation="tanh")
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    data = normal(4, 2)
    x = graph.placeholder("float32", [None, 2])

    hidden = dense(x)
    values = run([hidden, model(hidden)], {x: data})

    np.testing.assert_allclose(values[0], host(dense(data)), **ROUNDING)
    np.testing.assert_allclose(values[1], host(model(dense(data))), **ROUNDING)


def test_masks_reach_the_layers_behind() -> None:
    embedding, recurrent = layers.Embedding(5, 3, mask_zero=True), layers.LSTM(2)
    words = np.array([[1, 2, 0, 0], [3, 0, 0, 0]], "int32")
    x = graph.placeholder("int32", [None, 4])

    value = run(recurrent(embedding(x)), {x: words})

    np.testing.assert_allclose(value, host(recurrent(embedding(words))), **ROUNDING)
    unmasked = host(recurrent(embedding(words), mask=np.ones((2, 4), "bool")))
    assert not np.allclose(value, unmasked, rtol=1e-3)


def test_each_of_several_outputs_is_a_tensor() -> None:
    recurrent, data = layers.LSTM(2, return_state=True), normal(2, 3, 2)
    x = graph.placeholder("float32", [None, 3, 2])
    outputs = recurrent(x)

    values = run([outputs, outputs[2], ops.split(x, 3, axis=1)[1]], {x: data})

    for mine, theirs in zip(values[0], recurrent(data), strict=True):
        np.testing.assert_allclose(mine, host(theirs), **ROUNDING)
    np.testing.assert_array_equal(values[1], values[0][2])
    np.testing.assert_array_equal(values[2], data[:, 1:2])


def test_losses_give_what_keras_gives() -> None:
    logits, labels = normal(4, 3), np.array([0, 2, 1, 2], "int32")
    x = graph.placeholder("float32", [None, 3])
    y = graph.placeholder("int32", [None])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    each = keras.losses.sparse_categorical_crossentropy(y, x, from_logits=True)
    values = run([ops.mean(each), graph.call(loss, y, x)], {x: logits, y: labels})

    wanted = np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(4), labels])
    np.testing.assert_allclose(values, [wanted, wanted], **ROUNDING)
