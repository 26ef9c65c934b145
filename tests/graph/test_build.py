"""What a graph is made of: placeholders, variables, constants, random numbers, Keras on top.

Numbers that float32 holds exactly are compared exactly. 1e-6 is for a handful of float32
operations, each of which rounds at 6e-8.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from helpers import host, normal
from keras import layers, ops

from trainstep import graph

ROUNDING = {"rtol": 1e-6, "atol": 1e-6}


def run(fetches: Any, feed_dict: Any = None) -> Any:
    return graph.Session().run(fetches, feed_dict)


def identities(things: Any) -> set[int]:
    """Variables compare elementwise; sets of them are compared by identity."""
    return {id(thing) for thing in things}


# Placeholders


def test_a_placeholder_is_a_symbolic_tensor_of_keras() -> None:
    x = graph.placeholder("float32", [None, 3], name="x")

    assert isinstance(x, keras.KerasTensor)
    assert tuple(x.shape) == (None, 3)
    assert x.dtype == "float32"
    np.testing.assert_array_equal(run(x, {x: [[1, 2, 3]]}), [[1.0, 2.0, 3.0]])


@pytest.mark.parametrize(
    ("dtype", "value"), [("float32", 2.5), ("int32", 3), ("bool", True), ("float16", 0.5)]
)
def test_a_scalar_of_any_dtype_goes_in_and_comes_out(dtype: str, value: Any) -> None:
    x = graph.placeholder(dtype, [])
    came = run(x, {x: value})

    assert came == value
    assert isinstance(came, np.ndarray | np.generic)
    assert came.dtype == dtype
    assert came.shape == ()


# Variables


@pytest.mark.parametrize(
    ("initial", "dtype"),
    [(2.0, "float32"), ([[1.0, 2.0]], "float32"), (np.arange(3, dtype="int32"), "int32")],
    ids=["number", "list", "array"],
)
def test_a_variable_has_its_initial_value_at_once(initial: Any, dtype: str) -> None:
    v = graph.Variable(initial)

    assert isinstance(v, keras.KerasTensor)
    assert isinstance(v.variable, keras.Variable)
    assert v.dtype == v.variable.dtype == dtype
    assert tuple(v.shape) == np.shape(initial)
    for value in (v.numpy(), host(v.variable), run(v), run(v.variable)):
        np.testing.assert_array_equal(value, initial)


def test_dtype_name_and_trainable_are_taken() -> None:
    v = graph.Variable([1, 2], trainable=False, name="steps", dtype="float16")

    assert v.dtype == v.variable.dtype == "float16"
    assert v.variable.trainable is False
    assert "steps" in v.name
    assert graph.Variable(1.0).variable.trainable is True


def test_a_variable_is_loaded_and_the_next_run_sees_it() -> None:
    v = graph.Variable([1.0, 2.0])
    session = graph.Session()
    double = 2.0 * v
    np.testing.assert_array_equal(session.run(double), [2.0, 4.0])

    v.load([3.0, 5.0])

    np.testing.assert_array_equal(v.numpy(), [3.0, 5.0])
    np.testing.assert_array_equal(session.run(double), [6.0, 10.0])
    v.variable.assign([7.0, 8.0])  # behind the graph's back, as a callback would
    np.testing.assert_array_equal(session.run(double), [14.0, 16.0])


def test_a_variable_starts_from_random_numbers_and_is_drawn_anew() -> None:
    v = graph.Variable(graph.random_normal([40], stddev=0.1))
    fixed = graph.Variable(3.0)
    session = graph.Session()
    start = v.numpy().copy()
    # 40 numbers of deviation 0.1: none is beyond 0.6 but once in 4e7 times
    assert 0 < np.abs(start).max() < 0.6

    fixed.load(4.0)
    session.run(graph.global_variables_initializer())

    assert fixed.numpy() == 3.0
    again = v.numpy()
    assert again.shape == (40,)
    assert not np.array_equal(again, start)
    assert 0 < np.abs(again).max() < 0.6


def test_a_variable_starts_from_an_expression_without_placeholders() -> None:
    v = graph.Variable(graph.constant([1.0, 2.0]) * 3.0 + 1.0)

    np.testing.assert_array_equal(v.numpy(), [4.0, 7.0])


def test_read_takes_a_variable_of_keras_into_an_expression() -> None:
    theirs = keras.Variable([[1.0, 2.0], [3.0, 4.0]])
    session = graph.Session()
    penalty = ops.sum(graph.read(theirs) ** 2)

    assert session.run(penalty) == 30.0
    theirs.assign(np.ones((2, 2)))
    assert session.run(penalty) == 4.0


# Constants, identities, names


def test_a_constant_is_its_value() -> None:
    c = graph.constant([1, 2], dtype="float32", name="c")
    whole = graph.constant([1, 2])

    value = run(c + 1.0)
    assert value.dtype == "float32"
    np.testing.assert_array_equal(value, [2.0, 3.0])
    assert np.issubdtype(run(whole).dtype, np.integer)


def test_a_constant_does_not_follow_the_array_that_it_was_made_from() -> None:
    array = np.array([1.0, 2.0], "float32")
    c = graph.constant(array)
    array[:] = 9.0

    np.testing.assert_array_equal(run(c), [1.0, 2.0])


def test_identity_gives_a_name_to_any_tensor() -> None:
    x = graph.placeholder("float32", [None], name="x")
    graph.identity(x * 2.0, name="twice")

    np.testing.assert_array_equal(run("twice", {"x": [1.0, 2.0]}), [2.0, 4.0])
    np.testing.assert_array_equal(run("twice:0", {"x:0": [1.0, 2.0]}), [2.0, 4.0])


def test_a_name_that_is_taken_is_made_unique() -> None:
    first = graph.placeholder("float32", [], name="x")
    second = graph.placeholder("float32", [], name="x")
    one, two = graph.no_op(name="nothing"), graph.no_op(name="nothing")
    v, w = graph.Variable(1.0, name="v"), graph.Variable(2.0, name="v")

    assert first.name != second.name
    assert one.name != two.name
    assert v.name != w.name
    assert run([first.name, second.name], {first: 1.0, second: 2.0}) == [1.0, 2.0]
    assert run([v.name, w.name, one.name]) == [1.0, 2.0, None]


def test_two_graphs_may_use_the_same_name() -> None:
    found = []
    for value in (1.0, 2.0):
        with graph.Graph().as_default() as inside:
            graph.constant(value, name="c")
            found.append(graph.Session(graph=inside).run("c"))

    assert found == [1.0, 2.0]


# Random numbers


@pytest.mark.parametrize("draw", [graph.random_normal, graph.random_uniform])
def test_random_numbers_are_drawn_anew_at_every_run(draw: Any) -> None:
    numbers, others = draw([5]), draw([5])
    session = graph.Session()

    a, same, b = session.run([numbers, numbers * 1.0, others])
    c = session.run(numbers)

    np.testing.assert_array_equal(a, same)  # one draw in a run
    assert a.shape == (5,)
    assert not np.array_equal(a, b)
    assert not np.array_equal(a, c)


@pytest.mark.parametrize("draw", [graph.random_normal, graph.random_uniform])
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


def test_losses_give_what_keras_gives() -> None:
    logits, labels = normal(4, 3), np.array([0, 2, 1, 2], "int32")
    x = graph.placeholder("float32", [None, 3])
    y = graph.placeholder("int32", [None])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    each = keras.losses.sparse_categorical_crossentropy(y, x, from_logits=True)
    values = run([ops.mean(each), graph.call(loss, y, x)], {x: logits, y: labels})

    wanted = np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(4), labels])
    np.testing.assert_allclose(values, [wanted, wanted], **ROUNDING)


# What there is to train


def test_the_variables_of_a_graph_are_its_own_and_those_of_its_layers() -> None:
    x = graph.placeholder("float32", [None, 2])
    w = graph.Variable(np.ones((2, 2), "float32"))
    step = graph.Variable(0, trainable=False)
    dense, norm = layers.Dense(2), layers.BatchNormalization()
    norm(dense(x @ w))
    unused = layers.Dense(2)
    unused.build((None, 2))

    trainable = graph.trainable_variables()
    every = graph.global_variables()

    assert all(isinstance(v, keras.Variable) for v in every)
    wanted = [w.variable, *dense.trainable_variables, *norm.trainable_variables]
    assert identities(trainable) == identities(wanted)
    assert len(trainable) == len(wanted)
    moving = [norm.moving_mean, norm.moving_variance]
    assert identities([*wanted, step.variable, *moving]) <= identities(every)
    assert len(identities(every)) == len(every)
    assert not identities(every) & identities(unused.variables)


def test_the_variables_of_another_graph_are_not_listed() -> None:
    graph.Variable(1.0)
    with graph.Graph().as_default() as inside:
        assert graph.get_default_graph() is inside
        assert graph.global_variables() == []
        mine = graph.Variable(2.0)
        assert identities(graph.trainable_variables()) == {id(mine.variable)}
    assert graph.get_default_graph() is not inside
    assert len(graph.trainable_variables()) == 1


def test_own_variables_come_in_the_order_in_which_they_were_made() -> None:
    made = [graph.Variable(float(i)) for i in range(4)]

    assert [id(v) for v in graph.trainable_variables()] == [id(v.variable) for v in made]
