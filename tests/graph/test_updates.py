"""Operations: assignments, groups, and the order in which they are made.

Numbers here are held exactly by float32, and are compared exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from tests.helpers import host
from trainstep import graph


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


def test_an_operation_that_is_needed_twice_runs_once(session: graph.Session) -> None:
    v, w = graph.Variable(1.0), graph.Variable(0.0)
    add = v.assign_add(1.0)
    with graph.control_dependencies([add]):
        after = w.assign(v * 10.0)

    session.run([add, graph.group(add, after), after])

    assert (v.numpy(), w.numpy()) == (2.0, 20.0)


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


def test_one_run_shows_a_variable_at_every_stage(session: graph.Session) -> None:
    v = graph.Variable(1.0)
    before = graph.identity(v)
    with graph.control_dependencies([v.assign_add(1.0)]):
        between = graph.identity(v)
        with graph.control_dependencies([v.assign(v * 10.0)]):
            after = graph.identity(v)

    assert session.run([after, between, before, v]) == [20.0, 2.0, 1.0, 1.0]
    assert v.numpy() == 20.0


def test_the_loss_after_a_step_is_fetched_with_the_loss_before(session: graph.Session) -> None:
    w = graph.Variable(4.0)
    loss = w * w
    train = graph.train.minimize(keras.optimizers.SGD(0.25), loss)
    with graph.control_dependencies([train]):
        after = graph.identity(w * w)

    assert session.run([loss, after]) == [16.0, 4.0]


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


def test_a_plain_expression_in_the_block_runs_what_it_depends_on(session: graph.Session) -> None:
    v = graph.Variable(1.0)
    with graph.control_dependencies([v.assign_add(1.0)]):
        ten = v * 10.0
    outside = ten + v  # `v` here is of the state before

    assert session.run(ten) == 20.0
    assert v.numpy() == 2.0
    assert session.run([ten, v, outside]) == [30.0, 2.0, 32.0]


def test_what_is_written_in_a_block_is_computed_once(session: graph.Session) -> None:
    v, log = graph.Variable(1.0), graph.Variable(0.0)
    noise = graph.random_uniform([], seed=3)
    with graph.control_dependencies([v.assign_add(1.0)]):
        seen = v + noise
        again, kept = v.assign(seen * 2.0), log.assign(seen)

    _, _, value = session.run([again, kept, seen])

    assert log.numpy() == value
    assert v.numpy() == 2.0 * value


def test_an_outer_block_does_not_wait_for_an_inner_one(session: graph.Session) -> None:
    v = graph.Variable(1.0)
    with graph.control_dependencies([v.assign_add(1.0)]):
        early = v * 10.0
        with graph.control_dependencies([v.assign_add(5.0)]):
            late = v * 100.0

    assert session.run([early, late]) == [20.0, 700.0]
    assert session.run(early) == 80.0


def test_gradients_in_a_block_are_of_the_state_after(session: graph.Session) -> None:
    w = graph.Variable(1.0)
    with graph.control_dependencies([w.assign(3.0)]):
        square = w * w
        (slope,) = graph.gradients(square, [w])
    (outside,) = graph.gradients(square, [w])

    assert session.run([square, slope]) == [9.0, 6.0]
    w.load(1.0)
    assert session.run([square, outside, w]) == [9.0, 6.0, 1.0]
