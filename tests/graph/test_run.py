"""`Session.run`: what comes back, in which form; what is fed; sessions, sizes, threads, the ledger.

Numbers that float32 holds exactly are compared exactly; 1e-6 is for a few float32 operations.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from helpers import normal
from keras import layers, ops

import trainstep as ts
from trainstep import graph

ROUNDING = {"rtol": 1e-6, "atol": 1e-6}


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
    assert list(found) == ["a", "p", "none"]
    assert v.numpy() == 4.0


def test_a_single_fetch_gives_a_single_value(session: graph.Session) -> None:
    x = graph.placeholder("float32", [2], name="x")

    value = session.run(x * 2.0, {x: [1.0, 2.0]})

    assert isinstance(value, np.ndarray)
    np.testing.assert_array_equal(value, [2.0, 4.0])
    assert session.run(graph.no_op()) is None
    assert session.run([graph.no_op()]) == [None]
    assert session.run([]) == []


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


# Sizes


def test_batches_of_many_sizes_cost_few_traces(session: graph.Session) -> None:
    x, y = graph.placeholder("float32", [None, 2]), graph.placeholder("float32", [None])
    w = graph.Variable([1.0, -1.0])
    loss = ops.mean(ops.square(ops.sum(x * w, axis=-1) - y))
    train = graph.train.minimize(keras.optimizers.SGD(0.1), loss)
    for size in (8, 3, 5, 4, 7, 6, 2, 8, 1):
        a, b, start = normal(size, 2, seed=size), normal(size, seed=size + 50), w.numpy().copy()
        error = a @ start - b
        value, _ = session.run([loss, train], {x: a, y: b})

        np.testing.assert_allclose(value, np.mean(error**2), rtol=1e-5)  # a sum over a batch
        step = 0.1 * 2 / size * a.T @ error
        np.testing.assert_allclose(w.numpy(), start - step, rtol=1e-5, atol=1e-6)
    assert session.ledger.traces <= 3  # the first size, then one for all; not eight


def test_the_ledger_lists_each_set_of_fetches_with_its_reason(session: graph.Session) -> None:
    x = graph.placeholder("float32", [None], name="x")
    graph.identity(x + 1.0, name="more")
    graph.identity(x - 1.0, name="less")
    assert len(session.ledger) == 0

    for _ in range(3):
        session.run("more", {x: [1.0, 2.0]})
        session.run(["less", "more"], {x: [1.0, 2.0]})

    first, second = session.ledger
    assert session.ledger.traces == 2
    assert isinstance(first, ts.TraceEvent)
    described = [" ".join([e.function, e.signature, *e.changes]) for e in (first, second)]
    assert "more" in described[0]
    assert "less" not in described[0]
    assert "less" in described[1]
    assert first.reason
    assert second.reason
    assert "less" in str(second)
    assert "test_run.py" in first.site
    known = {(e.function, e.signature, e.when) for e in ts.ledger()}
    assert (first.function, first.signature, first.when) in known


# Sessions


def test_a_session_is_the_default_inside_its_block() -> None:
    x, v = graph.placeholder("float32", []), graph.Variable(2.0)
    step = v.assign_add(x)
    (dv,) = graph.gradients(v * v * x, [v])
    assert graph.get_default_session() is None

    with graph.Session() as outer:
        assert graph.get_default_session() is outer
        with graph.Session() as inner:
            assert graph.get_default_session() is inner
        assert graph.get_default_session() is outer
        assert x.eval({x: 4.0}) == 4.0
        assert v.eval() == 2.0
        assert graph.identity(v * x).eval({x: 3.0}) == 6.0
        assert dv.eval({x: 0.5}) == 2.0
        assert step.run({x: 5.0}) is None
        assert v.eval() == 7.0

    assert graph.get_default_session() is None
    other = graph.Session()
    step.run(feed_dict={x: 1.0}, session=other)
    assert v.eval(session=other) == 8.0


def test_a_failing_block_leaves_no_default_session() -> None:
    with pytest.raises(RuntimeError, match="mine"), graph.Session():
        raise RuntimeError("mine")

    assert graph.get_default_session() is None


def test_two_sessions_share_the_variables_of_a_graph() -> None:
    v = graph.Variable(1.0)
    graph.Session().run(v.assign(5.0))

    assert graph.Session().run(v) == 5.0


def test_a_session_runs_the_graph_that_it_was_given() -> None:
    other = graph.Graph()
    with other.as_default():
        graph.constant(2.0, name="c")
    graph.constant(1.0, name="c")

    assert graph.Session().run("c") == 1.0
    assert graph.Session(graph=other).run("c") == 2.0


def test_a_graph_grows_between_runs(session: graph.Session) -> None:
    x, v = graph.placeholder("float32", []), graph.Variable(2.0)
    assert session.run(v * x, {x: 1.0}) == 2.0

    w = graph.Variable(5.0)

    assert session.run(v * x + w, {x: 1.0}) == 7.0


def test_threads_may_run_one_session(session: graph.Session) -> None:
    x, total = graph.placeholder("float32", []), graph.Variable(0.0)
    add, seen, errors = total.assign_add(x), [], []
    session.run([add, total], {x: 0.0})

    def work(amount: float) -> None:
        try:
            for _ in range(20):
                seen.append(float(session.run([add, total], {x: amount})[1]))
        except Exception as error:  # an assertion in a thread is lost
            errors.append(error)

    threads = [threading.Thread(target=work, args=(float(a),)) for a in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not errors
    assert total.numpy() == 200.0
    assert len(set(seen)) == 80  # each run saw a total that no other saw
