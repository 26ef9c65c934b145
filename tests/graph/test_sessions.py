"""Sessions: the default one, sizes of batches, the ledger, threads."""

from __future__ import annotations

import threading

import keras
import numpy as np
import pytest
from keras import ops

import trainstep as ts
from tests.helpers import normal
from trainstep import graph


@pytest.fixture
def session() -> graph.Session:
    return graph.Session()


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


def test_a_session_compiles_for_exact_shapes_if_it_is_told_to() -> None:
    x = graph.placeholder("float32", [None, None])
    total = ops.sum(x)
    session = graph.Session(shapes="exact")

    for size in (2, 3, 4):
        assert session.run(total, {x: np.ones((size, size))}) == size**2

    assert session.ledger.traces == 3
    with pytest.raises(ts.ArgumentError, match="Shapes"):
        graph.Session(shapes="any")


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
    assert "test_sessions.py" in first.site
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
    assert session.ledger.traces == 1


def test_what_is_the_default_is_so_in_its_thread_alone() -> None:
    found = []
    with graph.Graph().as_default() as inside, graph.Session() as session:
        thread = threading.Thread(
            target=lambda: found.append((graph.get_default_graph(), graph.get_default_session()))
        )
        thread.start()
        thread.join()
        assert graph.get_default_session() is session

    assert found[0][0] is not inside
    assert found[0][1] is None


def test_a_session_runs_inside_a_plain_tf_function(backend: str) -> None:
    if backend != "tensorflow":
        pytest.skip("it is TensorFlow's own")
    import tensorflow as tf

    x, w = graph.placeholder("float32", [None]), graph.Variable(2.0)
    fetches = [w.assign_add(1.0), w * x]
    session = graph.Session()
    step = session.make_callable(fetches, [x])

    run = tf.function(lambda data: session.run(fetches, {x: data})[1] + 1.0, autograph=False)
    call = tf.function(lambda data: step(data)[1] + 1.0, autograph=False)
    data = tf.constant([1.0, 2.0])

    assert [run(data).numpy().tolist() for _ in range(2)] == [[3.0, 5.0], [4.0, 7.0]]
    assert call(data).numpy().tolist() == [5.0, 9.0]
    assert w.numpy() == 5.0
