"""Operations: assignments and their order, groups, and optimizers.

Numbers that float32 holds exactly are compared exactly. Optimizers are compared with the same
Keras optimizer applied by hand on the same engine: linear ones to a few roundings (1e-6), those
that divide by the size of the gradient to 1e-5, for there a rounding weighs more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from helpers import assert_same, host, normal, values_of
from keras import layers, ops

from trainstep import graph

LINEAR, ADAPTIVE = 1e-6, 1e-5


@pytest.fixture
def session() -> graph.Session:
    return graph.Session()


# Assignments


def test_assignments_set_add_and_subtract(session: graph.Session) -> None:
    x, v = graph.placeholder("float32", [2]), graph.Variable([1.0, 2.0])
    ways = [(v.assign, graph.assign), (v.assign_add, graph.assign_add)]
    ways += [(v.assign_sub, graph.assign_sub)]
    wanted = [[3.0, 4.0], [6.0, 8.0], [3.0, 4.0]]
    for (method, function), value in zip(ways, wanted, strict=True):
        start = v.numpy().copy()
        for make in (method, lambda amount, function=function: function(v, amount)):
            v.load(start)
            operation = make(x)
            assert isinstance(operation, graph.Operation)
            assert session.run(operation, {x: [3.0, 4.0]}) is None
            np.testing.assert_array_equal(v.numpy(), value)


def test_variables_of_keras_are_assigned_to(session: graph.Session) -> None:
    theirs = keras.Variable([1.0, 2.0])
    session.run(graph.assign(theirs, graph.read(theirs) * 2.0, name="doubling"))
    session.run("doubling")

    np.testing.assert_array_equal(host(theirs), [4.0, 8.0])


def test_numbers_and_arrays_are_assigned(session: graph.Session) -> None:
    v, count = graph.Variable([0.0, 0.0]), graph.Variable(0, trainable=False)
    session.run([v.assign(np.array([1.0, 2.0])), count.assign_add(1)])

    np.testing.assert_array_equal(v.numpy(), [1.0, 2.0])
    assert count.numpy() == 1
    assert np.issubdtype(count.numpy().dtype, np.integer)


def test_values_are_those_before_the_updates_of_the_run(session: graph.Session) -> None:
    a, b = graph.Variable(1.0), graph.Variable(2.0)
    swap = [a.assign(b), b.assign(a)]

    assert session.run([swap, a, b, a + b]) == [[None, None], 1.0, 2.0, 3.0]
    assert (a.numpy(), b.numpy()) == (2.0, 1.0)


def test_updates_of_one_variable_come_in_the_order_of_creation(session: graph.Session) -> None:
    v = graph.Variable(1.0)
    first, second = v.assign(5.0), v.assign(7.0)
    add, more = v.assign_add(1.0), v.assign_add(2.0)

    session.run([second, first])  # the order of fetches says nothing
    assert v.numpy() == 7.0
    session.run([more, add])
    assert v.numpy() == 10.0
    session.run([more, first])
    assert v.numpy() == 7.0


def test_a_group_runs_all_of_its_operations(session: graph.Session) -> None:
    a, b = graph.Variable(1.0), graph.Variable(2.0)
    both = graph.group(a.assign_add(1.0), graph.group(b.assign_add(1.0)), name="both")

    assert isinstance(both, graph.Operation)
    assert session.run(both) is None
    session.run("both")
    assert (a.numpy(), b.numpy()) == (3.0, 4.0)
    session.run([both, graph.group(), graph.no_op()])
    assert (a.numpy(), b.numpy()) == (4.0, 5.0)


# Order


def chained(first: str) -> tuple[Any, Any]:
    """v doubled and then 3 more, or the other way around; the last operation needs the first."""
    v = graph.Variable(1.0)
    steps: dict[str, Callable[[], Any]] = {
        "double": lambda: v.assign(v * 2.0),
        "add": lambda: v.assign(v + 3.0),
    }
    second = next(name for name in steps if name != first)
    before = steps[first]()
    with graph.control_dependencies([before]):
        return v, steps[second]()


@pytest.mark.parametrize(("first", "wanted"), [("double", 5.0), ("add", 8.0)])
def test_control_dependencies_fix_an_order(
    session: graph.Session, first: str, wanted: float
) -> None:
    v, last = chained(first)

    session.run(last)  # which brings the other along

    assert v.numpy() == wanted


def test_without_control_dependencies_each_sees_what_was_there_before(
    session: graph.Session,
) -> None:
    v, w = graph.Variable(1.0), graph.Variable(0.0)
    double = v.assign(v * 2.0)
    copy = w.assign(v + 3.0)

    session.run([double, copy])

    assert (v.numpy(), w.numpy()) == (2.0, 4.0)


def test_an_expression_from_outside_of_the_block_keeps_its_value(session: graph.Session) -> None:
    v, w = graph.Variable(1.0), graph.Variable(0.0)
    outside = v + 3.0
    with graph.control_dependencies([v.assign(v * 2.0)]):
        copy = w.assign(outside)

    session.run(copy)

    assert (v.numpy(), w.numpy()) == (2.0, 4.0)


def test_identity_inside_the_block_is_the_value_after(session: graph.Session) -> None:
    v = graph.Variable(1.0)
    with graph.control_dependencies([v.assign_add(1.0)]):
        after = graph.identity(v)

    assert session.run([after, v]) == [2.0, 1.0]
    assert session.run(after) == 3.0
    assert v.numpy() == 3.0


def test_blocks_nest_and_end(session: graph.Session) -> None:
    v, log = graph.Variable(1.0), graph.Variable(0.0)
    with graph.control_dependencies([v.assign(v * 2.0)]):
        with graph.control_dependencies([v.assign(v + 3.0)]):
            inner = log.assign(v * 10.0)
    outside = log.assign(v * 100.0)

    session.run(inner)
    assert (v.numpy(), log.numpy()) == (5.0, 50.0)
    session.run(outside)
    assert (v.numpy(), log.numpy()) == (5.0, 500.0)


@pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
def test_a_moving_average_follows_the_trained_weight(session: graph.Session, after: bool) -> None:
    w, average = graph.Variable(4.0), graph.Variable(0.0, trainable=False)
    train = graph.train.minimize(keras.optimizers.SGD(0.25), w * w)
    with graph.control_dependencies([train] if after else []):
        move = average.assign(0.5 * average + 0.5 * w)

    session.run([train, move])

    assert w.numpy() == 2.0
    assert average.numpy() == (1.0 if after else 2.0)


# Optimizers

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


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", ["minimize", "apply_gradients", "compute_gradients"])
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


def test_the_initializer_leaves_values_alone_until_it_runs(session: graph.Session) -> None:
    w = graph.Variable(2.0)
    w.load(3.0)
    initializer = graph.global_variables_initializer()

    assert isinstance(initializer, graph.Operation)
    assert w.numpy() == 3.0
    session.run(initializer)
    assert w.numpy() == 2.0
