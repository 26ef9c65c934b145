"""Corners: what would give a number that nobody expects gives the right one, or is refused."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, ops

import trainstep as ts
from trainstep import graph


@pytest.fixture
def session() -> graph.Session:
    return graph.Session()


def test_a_feed_is_what_a_gradient_is_by_and_goes_on_behind_it(session: graph.Session) -> None:
    w = graph.Variable(2.0)
    hidden = w * 3.0

    by_both = graph.gradients(hidden * hidden, [w, hidden])

    assert session.run(by_both, {hidden: 10.0}) == [60.0, 20.0]


def test_a_variable_that_is_fed_is_still_differentiated_by(session: graph.Session) -> None:
    w = graph.Variable(2.0)

    assert session.run(graph.gradients(w * w, w), {w: 5.0}) == [10.0]
    session.run(graph.train.minimize(keras.optimizers.SGD(0.1), w * w), {w: 5.0})
    assert w.numpy() == 1.0


def test_a_weight_that_its_layer_reads_itself_is_not_fed(session: graph.Session) -> None:
    layer = layers.Dense(1, name="last")
    out = layer(graph.placeholder("float32", [None, 2], name="x"))

    with pytest.raises(ts.ArgumentError, match=r"(?s)last/kernel.*`load`"):
        session.run(out, {"x": np.ones((1, 2)), graph.read(layer.kernel): np.ones((2, 1))})


def test_a_gradient_through_what_was_computed_before_a_block_is_refused(
    session: graph.Session,
) -> None:
    w = graph.Variable(1.0)
    hidden = w * 3.0
    with graph.control_dependencies([w.assign_add(1.0)]):
        loss = hidden * hidden
    (slope,) = graph.gradients(loss, [w])

    with pytest.raises(ts.ArgumentError, match=r"(?s)before the updates.*inside the block"):
        session.run([slope, loss])

    assert w.numpy() == 1.0


def test_a_block_of_none_shields_from_those_around_it(session: graph.Session) -> None:
    w = graph.Variable(1.0)
    with graph.control_dependencies([w.assign_add(1.0)]):
        with graph.control_dependencies(None):
            free = w + 10.0
        bound = w + 10.0

    assert session.run(free) == 11.0
    assert session.run(bound) == 12.0


def test_a_single_operation_may_be_depended_on(session: graph.Session) -> None:
    w = graph.Variable(1.0)
    with graph.control_dependencies(w.assign_add(1.0)):
        after = w * 1.0

    assert session.run(after) == 2.0


@pytest.mark.plain
def test_default_graphs_end_in_the_order_in_which_they_began() -> None:
    outer, inner = graph.Graph(), graph.Graph()
    with outer.as_default(), inner.as_default():
        with outer.as_default():
            pass
        assert graph.placeholder("float32", []).graph is inner


def test_numbers_have_the_dtype_of_the_variable(session: graph.Session, backend: str) -> None:
    if backend == "jax":
        pytest.skip("JAX has no float64 unless it is told to")
    v, x = graph.Variable(0.0, dtype="float64"), graph.placeholder("float64", [])
    session.run(v.assign_add(0.1))

    assert v.numpy() == 0.1
    third = session.run(x + v, {x: 1 / 3})
    assert third.dtype == "float64"
    assert third == 1 / 3 + 0.1


def test_numbers_that_would_be_lost_are_refused() -> None:
    count = graph.Variable(0)

    with pytest.raises(ts.ArgumentError, match="range of int32"):
        graph.constant(2**33)
    with pytest.raises(ts.ArgumentError, match=r"(?s)int32.*cast"):
        count.assign(graph.Variable(7.0) / 2.0)


def test_the_initializer_leaves_the_learning_rate(session: graph.Session) -> None:
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    w = graph.Variable(1.0)
    train = graph.train.minimize(optimizer, w * w)
    begin = graph.global_variables_initializer()
    session.run(train)
    optimizer.learning_rate = 0.5
    session.run(begin)

    assert float(optimizer.learning_rate) == 0.5
    assert w.numpy() == 1.0
    assert int(optimizer.iterations) == 0


def test_a_variable_that_began_with_another_begins_so_again(session: graph.Session) -> None:
    w = graph.Variable(1.0)
    double = graph.Variable(w * 2.0)
    w.load(10.0)
    session.run(graph.global_variables_initializer())

    assert (w.numpy(), double.numpy()) == (1.0, 2.0)


def test_what_is_not_a_number_is_not_clipped_to_one(session: graph.Session) -> None:
    clipped, _ = graph.clip_by_global_norm([graph.constant([np.nan, 3.0])], 1.0)

    assert np.isnan(session.run(clipped[0])).all()


@pytest.mark.plain
def test_targets_are_told_by_the_loss_of_their_output() -> None:
    x = keras.Input((3,))
    model = keras.Model(x, [layers.Dense(1, name="z")(x), layers.Dense(4, name="a")(x)])
    classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True, name="ce")

    parts = graph.of(ts.Trainer(model, "sgd", loss={"z": "mse", "a": classes}))

    assert [(tuple(y.shape), y.dtype) for y in parts.y] == [
        ((None, 1), "float32"),
        ((None,), "int32"),
    ]


@pytest.mark.plain
def test_outputs_without_a_loss_need_their_targets_said() -> None:
    x = keras.Input((3,))
    model = keras.Model(x, [layers.Dense(1, name="z")(x), layers.Dense(4, name="a")(x)])
    trainer = ts.Trainer(model, "sgd", loss={"z": "mse"})

    with pytest.raises(ts.ArgumentError, match=r"(?s)`y`.*ts\.Spec"):
        graph.of(trainer)


def test_a_function_that_cannot_be_run_symbolically_is_named() -> None:
    x = graph.placeholder("float32", [None])

    def broken(tensor: object) -> object:
        raise ValueError("nothing to see")

    with pytest.raises(ts.ArgumentError, match=r"broken, which raised .*: nothing to see"):
        graph.call(broken, x)


@pytest.mark.plain
def test_integers_have_no_gradients() -> None:
    with pytest.raises(ts.ArgumentError, match=r"(?s)`ys`.*float"):
        graph.gradients(graph.constant(3), graph.Variable(1.0))


def test_zeros_and_ones_are_bools(session: graph.Session) -> None:
    flags = graph.placeholder("bool", [None], name="flags")

    assert session.run(flags, {flags: [1, 0]}).tolist() == [True, False]
    with pytest.raises(ts.ArgumentError, match="flags"):
        session.run(flags, {flags: [2, 0]})


def test_branches_and_loops_are_functions_of_their_tensors(session: graph.Session) -> None:
    x = graph.placeholder("float32", [None])
    chosen = graph.call(lambda t: ops.cond(ops.sum(t) > 3.0, lambda: t * 2.0, lambda: t - 1.0), x)
    grown = graph.call(
        lambda t: ops.while_loop(lambda v: ops.sum(v) < 100.0, lambda v: (v * 2.0,), (t,))[0], x
    )

    assert session.run(chosen, {x: [1.0, 1.0]}).tolist() == [0.0, 0.0]
    assert session.run(chosen, {x: [5.0, 1.0]}).tolist() == [10.0, 2.0]
    assert session.run(grown, {x: [1.0, 1.0]}).tolist() == [64.0, 64.0]


def test_branches_that_take_tensors_from_around_them_are_refused(
    session: graph.Session, backend: str
) -> None:
    x = graph.placeholder("float32", [None])
    y = x * 1.0

    by_others = (TypeError, ValueError)  # JAX and Keras, where they can tell
    with pytest.raises((ts.ArgumentError, *by_others)) as refused:
        session.run(ops.cond(ops.sum(x) > 3.0, lambda: y * 2.0, lambda: y), {x: [1.0]})
    if backend != "jax":
        assert "`graph.cond`" in str(refused.value)

    with pytest.raises((ts.ArgumentError, *by_others)) as refused:
        session.run(ops.scan(lambda c, v: (c + y[0], c + v), x[0], x)[0], {x: [1.0]})
    if backend != "jax":
        assert "graph.call" in str(refused.value)

    loop = ops.while_loop(lambda v: ops.sum(v) < 3.0, lambda v: v + y, x)
    with pytest.raises(ts.ArgumentError, match=r"(?s)keras\.ops\.while_loop.*`graph\.while_loop`"):
        session.run(loop, {x: [1.0]})


def test_a_branch_that_keras_wrote_is_told_the_cure(session: graph.Session, backend: str) -> None:
    """`hinge` has a `cond` inside, of which the user knows nothing."""
    x, y = graph.placeholder("float32", [None, 2]), graph.placeholder("float32", [None, 2])
    feeds = {x: [[0.5, -0.5]], y: [[1.0, 1.0]]}

    each = graph.call(keras.losses.hinge, y, x)
    assert session.run(each, feeds) == [1.0]
    if backend != "jax":  # there Keras refuses it itself
        with pytest.raises(ts.ArgumentError, match=r"(?s)keras\.losses\.hinge.*graph\.call\("):
            session.run(keras.losses.hinge(y, x), feeds)


def test_a_function_that_takes_tensors_from_around_it_is_told_the_cure(
    session: graph.Session,
) -> None:
    x = graph.placeholder("float32", [None])
    y = x * 2.0

    with pytest.raises(ts.ArgumentError, match=r"(?s)graph\.call.*as arguments"):
        session.run(graph.call(lambda t: t * y, x), {x: [1.0]})
    with pytest.raises(ts.ArgumentError, match=r"(?s)`graph\.cond`.*`graph\.shape`"):
        graph.call(lambda t: t.reshape_to_what_is_not_there, x)


def test_an_array_stands_on_the_right_of_what_keras_gave(session: graph.Session) -> None:
    x, ones = graph.placeholder("float32", [3]), np.ones(3, "float32")

    with pytest.raises(ValueError, match="symbolic"):
        ones * ops.square(x)  # NumPy computes it, and asks for numbers
    found = [ops.square(x) * ones, ops.multiply(ones, ops.square(x)), ones * (x * x)]
    for value in session.run(found, {x: [1.0, 2.0, 3.0]}):
        assert value.tolist() == [1.0, 4.0, 9.0]
