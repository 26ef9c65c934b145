"""Optimizers of Keras as operations, against the same optimizer applied by hand.

On the same engine, linear ones agree to a few roundings (1e-6), and those that divide by the size
of the gradient to 1e-5, for there a rounding weighs more. Numbers that float32 holds exactly are
compared exactly.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from tests.helpers import assert_same, host, normal, values_of
from trainstep import graph

LINEAR, ADAPTIVE = 1e-6, 1e-5


@pytest.fixture
def session() -> graph.Session:
    return graph.Session()


OPTIMIZERS = {
    "sgd": (lambda: keras.optimizers.SGD(0.1), LINEAR),
    "momentum": (lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True), LINEAR),
    "clipped": (lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.5), LINEAR),
    "adam": (lambda: keras.optimizers.Adam(0.1), ADAPTIVE),
    "rmsprop": (lambda: keras.optimizers.RMSprop(0.1, momentum=0.5), ADAPTIVE),
    "adamw": (lambda: keras.optimizers.AdamW(0.1, weight_decay=0.2), ADAPTIVE),
    "schedule": (
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
        LINEAR,
    ),
}
STARTS = [normal(3, 2, seed=1), normal(2, seed=2)]


def by_hand(optimizer: Any, gradients: list[list[np.ndarray]]) -> list[Any]:
    """The weights after some steps, and the optimizer's own variables."""
    weights = [keras.Variable(start) for start in STARTS]
    optimizer.build(weights)
    for step in gradients:
        optimizer.apply([ops.convert_to_tensor(g) for g in step], weights)
    return weights


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "minimize") for name in ("clipped", "adam", "adamw", "schedule")),
        *(
            pytest.param(name, "minimize", marks=pytest.mark.slow)
            for name in ("sgd", "momentum", "rmsprop")
        ),
        ("clipped", "apply_gradients"),
        ("adam", "apply_gradients"),
        ("schedule", "compute_gradients"),
        ("adamw", "compute_gradients"),
    ],
)
def test_an_optimizer_does_what_it_does_by_hand(
    session: graph.Session, name: str, way: str
) -> None:
    make, tolerance = OPTIMIZERS[name]
    mine, theirs = make(), make()
    weights = [graph.Variable(start) for start in STARTS]
    slopes = [graph.placeholder("float32", start.shape) for start in STARTS]
    loss = sum(ops.sum(w * s) for w, s in zip(weights, slopes, strict=True))  # gradients: slopes
    if way == "minimize":
        train = graph.train.minimize(mine, loss)
    elif way == "compute_gradients":
        pairs = graph.train.compute_gradients(mine, loss)
        assert [id(v) for _, v in pairs] == [id(v) for v in graph.trainable_variables()]
        train = graph.train.apply_gradients(mine, pairs)
    else:
        variables = graph.trainable_variables()
        pairs = zip(graph.gradients(loss, variables), variables, strict=True)
        train = graph.train.apply_gradients(mine, pairs)
    given = [[normal(*s.shape, seed=10 * i + j) for j, s in enumerate(STARTS)] for i in range(4)]

    for step in given:
        session.run([train, loss], dict(zip(slopes, step, strict=True)))

    wanted = by_hand(theirs, given)
    assert_same([w.variable for w in weights], wanted, rtol=tolerance, atol=tolerance)
    assert_same(mine.variables, theirs.variables, rtol=tolerance, atol=tolerance)
    assert host(mine.iterations) == 4


def test_an_optimizer_is_taken_by_name(session: graph.Session) -> None:
    w = graph.Variable(1.0)
    session.run(graph.train.minimize("sgd", w * w))  # whose rate is 0.01

    np.testing.assert_allclose(w.numpy(), 0.98, rtol=LINEAR)


def test_only_the_variables_of_the_list_are_trained(session: graph.Session) -> None:
    x = graph.placeholder("float32", [None, 2])
    first, last = layers.Dense(2), layers.Dense(1)
    loss = ops.mean(ops.square(last(first(x))))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    train = graph.train.minimize(optimizer, loss, var_list=last.trainable_variables)
    before = values_of(first.variables), values_of(last.variables)

    session.run(train, {x: normal(4, 2)})

    for old, v in zip(before[0], first.variables, strict=True):
        np.testing.assert_array_equal(old, host(v))
    for old, v in zip(before[1], last.variables, strict=True):
        assert not np.array_equal(old, host(v))


def test_minimize_trains_only_what_is_trainable(session: graph.Session) -> None:
    w, fixed = graph.Variable(1.0), graph.Variable(2.0, trainable=False)
    session.run(graph.train.minimize(keras.optimizers.SGD(0.25), w * w * fixed))

    assert (w.numpy(), fixed.numpy()) == (0.0, 2.0)


def test_one_optimizer_in_two_operations_keeps_a_slot_for_each_variable(
    session: graph.Session,
) -> None:
    """Momentum 0.5, gradient 1: steps of 1, then 1.5, then 1.75, each variable on its own."""
    a, b = graph.Variable(0.0), graph.Variable(0.0)
    optimizer = keras.optimizers.SGD(1.0, momentum=0.5)
    of_a = graph.train.minimize(optimizer, 1.0 * a, var_list=[a])
    of_b = graph.train.minimize(optimizer, 1.0 * b, var_list=[b])

    session.run(of_a)
    assert (a.numpy(), b.numpy()) == (-1.0, 0.0)
    session.run([of_a, of_b])
    assert (a.numpy(), b.numpy()) == (-2.5, -1.0)
    session.run(of_b)
    assert (a.numpy(), b.numpy()) == (-2.5, -2.5)
    session.run(of_a)
    assert (a.numpy(), b.numpy()) == (-4.25, -2.5)


def test_two_operations_of_one_optimizer_on_one_variable_share_its_slot(
    session: graph.Session,
) -> None:
    w = graph.Variable(0.0)
    optimizer = keras.optimizers.SGD(1.0, momentum=0.5)
    one = graph.train.minimize(optimizer, 1.0 * w)
    two = graph.train.minimize(optimizer, 2.0 * w)

    session.run(one)  # momentum -1
    session.run(two)  # momentum -2.5

    assert w.numpy() == -3.5


def test_two_optimizers_in_one_run_each_take_their_step_from_the_weights_before(
    session: graph.Session,
) -> None:
    w = graph.Variable(4.0)
    steps = [graph.train.minimize(keras.optimizers.SGD(rate), w * w) for rate in (0.25, 0.125)]

    session.run(steps)

    assert w.numpy() == 4.0 - 0.25 * 8.0 - 0.125 * 8.0


def test_slots_and_iterations_are_there_to_fetch(session: graph.Session) -> None:
    w = graph.Variable([2.0, 4.0])
    optimizer = keras.optimizers.SGD(0.25, momentum=0.5)
    train = graph.train.minimize(optimizer, ops.sum(w * w))
    assert session.run([train, optimizer.iterations]) == [None, 0]

    (slot,) = [v for v in optimizer.variables if tuple(v.shape) == (2,)]
    assert session.run(optimizer.iterations) == 1
    np.testing.assert_array_equal(session.run(slot), [-1.0, -2.0])  # rate times gradient


def test_another_learning_rate_counts_at_the_next_run(session: graph.Session) -> None:
    w = graph.Variable(8.0)
    optimizer = keras.optimizers.SGD(0.25)
    train = graph.train.minimize(optimizer, w * w)
    session.run(train)
    optimizer.learning_rate = 0.125
    session.run(train)

    assert w.numpy() == 3.0  # halved, then a quarter less
    assert session.ledger.traces == 1


def test_the_initializer_resets_variables_and_slots(session: graph.Session) -> None:
    w = graph.Variable([2.0, 4.0])
    optimizer = keras.optimizers.SGD(0.25, momentum=0.5)
    train = graph.train.minimize(optimizer, ops.sum(w * w))
    session.run(train)
    once = w.numpy().copy()
    session.run(train)

    session.run(graph.global_variables_initializer())

    np.testing.assert_array_equal(w.numpy(), [2.0, 4.0])
    assert host(optimizer.iterations) == 0
    for v in optimizer.variables:
        if tuple(v.shape) == (2,):
            np.testing.assert_array_equal(host(v), [0.0, 0.0])
    np.testing.assert_allclose(host(optimizer.learning_rate), 0.25)
    session.run(train)
    np.testing.assert_array_equal(w.numpy(), once)


def test_the_initializer_resets_an_optimizer_of_several_operations(
    session: graph.Session,
) -> None:
    a, b = graph.Variable([1.0, 2.0]), graph.Variable([[1.0], [2.0], [3.0]])
    optimizer = keras.optimizers.Adam(0.1)
    updates = [graph.train.minimize(optimizer, ops.sum(v * v), var_list=[v]) for v in (a, b)]
    session.run(updates)
    once = a.numpy().copy(), b.numpy().copy()
    session.run(updates)

    session.run(graph.global_variables_initializer())
    for slot in optimizer.variables:
        if slot is not optimizer.learning_rate:
            np.testing.assert_array_equal(host(slot), np.zeros(slot.shape), err_msg=slot.path)

    session.run(updates)
    assert_same([a.numpy(), b.numpy()], once, rtol=ADAPTIVE, atol=ADAPTIVE)


def test_the_initializer_leaves_values_alone_until_it_runs(session: graph.Session) -> None:
    w = graph.Variable(2.0)
    w.load(3.0)
    initializer = graph.global_variables_initializer()

    assert isinstance(initializer, graph.Operation)
    assert w.numpy() == 3.0
    session.run(initializer)
    assert w.numpy() == 2.0


def test_a_single_variable_is_trained_without_a_list(session: graph.Session) -> None:
    w, other = graph.Variable(1.0), graph.Variable(1.0)
    train = graph.train.minimize(keras.optimizers.SGD(0.5), w + other, var_list=w)

    session.run(train)

    assert session.run([w, other]) == [0.5, 1.0]
