"""What a graph is made of: placeholders, variables, constants and names.

Numbers here are held exactly by float32, and are compared exactly.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from tests.helpers import host
from trainstep import graph


def run(fetches: Any, feed_dict: Any = None) -> Any:
    return graph.Session().run(fetches, feed_dict)


def identities(things: Any) -> set[int]:
    """Variables compare elementwise; sets of them are compared by the identity of Keras's."""
    return {id(getattr(thing, "variable", thing)) for thing in things}


# Placeholders


@pytest.mark.plain
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

    assert all(isinstance(v, graph.Variable) for v in every)
    wanted = [w.variable, *dense.trainable_variables, *norm.trainable_variables]
    assert identities(trainable) == identities(wanted)
    assert len(trainable) == len(wanted)
    moving = [norm.moving_mean, norm.moving_variance]
    assert identities([*wanted, step.variable, *moving]) <= identities(every)
    assert len(identities(every)) == len(every)
    assert not identities(every) & identities(unused.variables)


@pytest.mark.plain
def test_the_variables_of_another_graph_are_not_listed() -> None:
    graph.Variable(1.0)
    with graph.Graph().as_default() as inside:
        assert graph.get_default_graph() is inside
        assert graph.global_variables() == []
        mine = graph.Variable(2.0)
        assert identities(graph.trainable_variables()) == {id(mine.variable)}
    assert graph.get_default_graph() is not inside
    assert len(graph.trainable_variables()) == 1


@pytest.mark.plain
def test_what_follows_a_layer_elsewhere_is_not_listed() -> None:
    """A layer of a model, or of another graph, brings its own weights and no one else's."""
    first, second, third = layers.Dense(2), layers.Dense(2), layers.Dense(2)
    keras.Sequential([keras.Input((2,)), first, second])
    with graph.Graph().as_default():
        third(first(graph.placeholder("float32", [None, 2])))
        assert identities(graph.global_variables()) == identities(
            [*first.variables, *third.variables]
        )

    first(graph.placeholder("float32", [None, 2]))

    assert identities(graph.trainable_variables()) == identities(first.trainable_variables)
    assert identities(graph.global_variables()) == identities(first.variables)


@pytest.mark.plain
def test_own_variables_come_in_the_order_in_which_they_were_made() -> None:
    made = [graph.Variable(float(i)) for i in range(4)]

    assert [id(v) for v in graph.trainable_variables()] == [id(v) for v in made]


@pytest.mark.plain
def test_weights_of_layers_are_listed_as_the_same_tensors_each_time() -> None:
    layer = layers.Dense(2, name="listed")
    layer(graph.placeholder("float32", [None, 3]))

    first, again = graph.trainable_variables(), graph.trainable_variables()

    assert [id(v) for v in first] == [id(v) for v in again]
    assert [v.path for v in first] == [v.path for v in layer.trainable_variables]
    assert first[0] is graph.read(layer.kernel)
