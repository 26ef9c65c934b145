"""`Session.run`: what comes back, and in which form; what may be fed, and what that overrides.

Numbers here are held exactly by float32, and are compared exactly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from keras import layers, ops

from trainstep import graph


class Pair(NamedTuple):
    left: Any
    right: Any


@pytest.fixture
def session() -> graph.Session:
    return graph.Session()


# Fetches


def test_values_come_in_the_structure_of_the_fetches(session: graph.Session) -> None:
    x = graph.placeholder("float32", [], name="x")
    v = graph.Variable(3.0, name="v")
    step = v.assign_add(1.0)

    fetches = {"a": [x, (x + 1.0, "v")], "p": Pair(v.variable, {"op": step}), "none": []}
    found = session.run(fetches, {x: 1.0})

    assert found == {"a": [1.0, (2.0, 3.0)], "p": Pair(3.0, {"op": None}), "none": []}
    assert isinstance(found["a"], list)
    assert isinstance(found["a"][1], tuple)
    assert isinstance(found["p"], Pair)
    assert v.numpy() == 4.0


def test_a_single_fetch_gives_a_single_value(session: graph.Session) -> None:
    x = graph.placeholder("float32", [2], name="x")

    value = session.run(x * 2.0, {x: [1.0, 2.0]})

    assert isinstance(value, np.ndarray)
    np.testing.assert_array_equal(value, [2.0, 4.0])
    assert session.run(graph.no_op()) is None
    assert session.run([graph.no_op()]) == [None]


def test_a_dict_keeps_the_order_of_its_keys(session: graph.Session) -> None:
    x = graph.placeholder("float32", [])
    fetches = {"z": x, "a": x + 1.0, "m": {"2": x, "1": x}}

    found = session.run(fetches, {x: 1.0})

    assert list(found) == ["z", "a", "m"]
    assert list(found["m"]) == ["2", "1"]
    assert found["a"] == 2.0


def test_no_fetches_give_no_values(session: graph.Session) -> None:
    """A list of summaries, say, that happens to be empty."""
    assert session.run([]) == []
    assert session.run({}) == {}


def test_the_same_fetch_twice_comes_twice(session: graph.Session) -> None:
    x = graph.placeholder("float32", [])
    v = graph.Variable(1.0)
    step = v.assign_add(1.0)

    assert session.run([x, x, v, v], {x: 5.0}) == [5.0, 5.0, 1.0, 1.0]
    assert session.run([step, step]) == [None, None]
    assert v.numpy() == 2.0  # an operation runs once in a run


def test_values_are_of_numpy_with_the_dtype_of_the_tensor(session: graph.Session) -> None:
    x = graph.placeholder("float32", [None])
    values = session.run([x, x > 0.0, ops.cast(x, "int32"), ops.sum(x)], {x: [1.0, -2.0]})

    assert [v.dtype.name for v in values] == ["float32", "bool", "int32", "float32"]


def test_a_value_that_was_fetched_stays_as_it_was(session: graph.Session) -> None:
    v = graph.Variable([1.0, 2.0])
    before = session.run(v)
    session.run(v.assign([5.0, 6.0]))

    np.testing.assert_array_equal(before, [1.0, 2.0])
    before[:] = 0.0  # the caller's own
    np.testing.assert_array_equal(session.run(v), [5.0, 6.0])


# Feeds


@pytest.mark.parametrize(
    "value",
    [
        [[1.0, 2.0]],
        ((1, 2),),
        np.array([[1.0, 2.0]]),
        np.array([[1, 2]], "int64"),
        np.array([[1.0, 2.0]], "float16"),
    ],
    ids=["list", "tuple", "float64", "int64", "float16"],
)
def test_values_of_a_kind_that_fits_are_cast(session: graph.Session, value: Any) -> None:
    x = graph.placeholder("float32", [None, 2])
    came = session.run(x, {x: value})

    assert came.dtype == "float32"
    np.testing.assert_array_equal(came, [[1.0, 2.0]])


def test_tensors_of_the_engine_are_fed(session: graph.Session) -> None:
    x = graph.placeholder("float32", [None])

    np.testing.assert_array_equal(
        session.run(x + 1.0, {x: ops.convert_to_tensor([1.0, 2.0])}), [2.0, 3.0]
    )


def test_an_intermediate_that_is_fed_takes_the_place_of_what_it_was_made_from(
    session: graph.Session,
) -> None:
    x = graph.placeholder("float32", [None], name="x")
    half = graph.identity(x * 0.5, name="half")
    out = half + 1.0
    v = graph.Variable([3.0])

    np.testing.assert_array_equal(session.run(out, {x: [4.0]}), [3.0])
    np.testing.assert_array_equal(session.run(out, {half: [4.0]}), [5.0])  # and needs no x
    np.testing.assert_array_equal(session.run(out, {"half": [6.0]}), [7.0])
    np.testing.assert_array_equal(session.run([half, out], {half: [4.0], x: [0.0]}), [[4.0], [5.0]])
    np.testing.assert_array_equal(session.run(v * 2.0, {v: [5.0]}), [10.0])
    np.testing.assert_array_equal(v.numpy(), [3.0])


def test_what_a_layer_gives_is_fed(session: graph.Session) -> None:
    x = graph.placeholder("float32", [None, 2])
    hidden = layers.Dense(3)(x)
    out = ops.sum(hidden, axis=-1)

    np.testing.assert_array_equal(session.run(out, {hidden: np.ones((2, 3))}), [3.0, 3.0])


def test_a_fed_intermediate_counts_in_gradients_and_updates(session: graph.Session) -> None:
    x, w = graph.placeholder("float32", []), graph.Variable(3.0)
    hidden = x * 2.0
    loss = ops.square(w * hidden)
    train = graph.train.minimize(keras.optimizers.SGD(0.5), loss)

    assert session.run(graph.gradients(loss, [w]), {hidden: 1.0}) == [6.0]
    session.run(train, {hidden: 1.0})
    assert w.numpy() == 0.0


def test_a_gradient_flows_on_behind_what_is_fed(session: graph.Session) -> None:
    """As in TensorFlow 1, where a feed changes a value and not what it is made from."""
    x = graph.placeholder("float32", [])
    hidden = x * 2.0
    (dx,) = graph.gradients(hidden * hidden, [x])

    assert session.run(dx, {x: 1.0}) == 8.0
    assert session.run(dx, {x: 1.0, hidden: 5.0}) == 20.0


def test_a_feed_that_is_not_needed_is_ignored(session: graph.Session) -> None:
    x, y = graph.placeholder("float32", [None]), graph.placeholder("float32", [None])
    out = x + 1.0
    session.run(out, {x: [1.0, 2.0]})
    traces = session.ledger.traces

    np.testing.assert_array_equal(session.run(out, {x: [1.0, 2.0], y: [1.0]}), [2.0, 3.0])
    np.testing.assert_array_equal(session.run(out, {x: [1.0, 2.0], y: np.ones(7)}), [2.0, 3.0])
    assert session.ledger.traces == traces


def test_a_callable_takes_the_values_in_order(session: graph.Session) -> None:
    x, y = graph.placeholder("float32", []), graph.placeholder("float32", [])
    v = graph.Variable(10.0)
    step = session.make_callable({"d": x - y, "v": v, "op": v.assign_sub(x)}, [y, x])

    assert step(1.0, 5.0) == {"d": 4.0, "v": 10.0, "op": None}
    assert step(2.0, np.float32(3.0)) == {"d": 1.0, "v": 5.0, "op": None}
    assert v.numpy() == 2.0
    assert session.make_callable(v)() == 2.0
    with pytest.raises(TypeError):
        step(1.0)
    assert v.numpy() == 2.0


def test_a_callable_takes_names_and_intermediates(session: graph.Session) -> None:
    x = graph.placeholder("float32", [], name="x")
    hidden = x * 2.0
    graph.identity(hidden + 1.0, name="out")

    assert session.make_callable("out:0", ["x:0"])(2.0) == 5.0
    assert session.make_callable("out", [hidden])(2.0) == 3.0


def test_what_a_layer_gives_is_fetched_and_fed_by_its_name() -> None:
    x = graph.placeholder("float32", [None, 2])
    total = ops.sum(layers.Dense(2, name="hidden", kernel_initializer="ones")(x))
    session = graph.Session()

    for name in ("hidden", "hidden:0"):
        assert session.run(name, {x: [[1.0, 2.0]]}).tolist() == [[3.0, 3.0]]
        assert session.run(total, {name: [[4.0, 5.0]]}) == 9.0
