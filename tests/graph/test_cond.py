"""`cond`: one of two functions of tensors from around them, against NumPy and `ts.function`.

Numbers that float32 holds exactly are compared exactly; 1e-5 is for gradients through layers.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import trainstep as ts
from tests.helpers import assert_same, host, normal, values_of
from trainstep import graph

LAYERS = 1e-5


@pytest.fixture
def session() -> graph.Session:
    return graph.Session()


def witness(seen: list[str], name: str) -> Any:
    """A function that passes a tensor on, and notes the runs of the program that it is part of."""

    def watched(x: Any) -> Any:
        ts.callback(lambda _: seen.append(name), ops.sum(x))
        return 1.0 * x

    return watched


# Values


def test_a_branch_takes_tensors_and_variables_from_around_it(session: graph.Session) -> None:
    x, w = graph.placeholder("float32", [None], name="x"), graph.Variable(3.0)
    hidden = x * 1.0
    y = graph.cond(ops.sum(x) > 3.0, lambda: hidden * w, lambda: hidden - 1.0, name="y")

    for values in ([5.0, 1.0], [1.0, 1.0], [1.0], [4.0, 0.0, 2.0]):
        array = np.array(values, "float32")
        wanted = array * 3.0 if array.sum() > 3.0 else array - 1.0
        np.testing.assert_array_equal(session.run("y", {x: values}), wanted)
    assert session.run(y, {x: [5.0], hidden: [7.0]}).tolist() == [21.0]  # what it takes is fed
    assert tuple(y.shape) == (None,)


def test_only_the_branch_that_is_taken_is_run(session: graph.Session) -> None:
    x, seen = graph.placeholder("float32", []), []
    y = graph.cond(
        x > 0.0,
        lambda: graph.call(witness(seen, "true"), x),
        lambda: graph.call(witness(seen, "false"), x),
    )

    run = session.make_callable(y, [x])
    for value in (1.0, -1.0, -2.0):
        run(value)

    assert seen == ["true", "false", "false"]


def test_branches_return_structures_numbers_and_variables(session: graph.Session) -> None:
    p, w = graph.placeholder("bool", []), graph.Variable([1.0, 2.0])
    theirs = keras.Variable([5.0, 6.0])
    found = graph.cond(
        p, lambda: {"a": w, "b": (0.0, [w + 1.0])}, lambda: {"a": theirs, "b": (1.5, [2.0 * w])}
    )

    yes, no = session.run(found, {p: True}), session.run(found, {p: False})

    assert (yes["a"].tolist(), yes["b"][0], yes["b"][1][0].tolist()) == ([1, 2], 0.0, [2, 3])
    assert (no["a"].tolist(), no["b"][0], no["b"][1][0].tolist()) == ([5, 6], 1.5, [2, 4])


def test_a_predicate_may_be_a_value(session: graph.Session) -> None:
    w = graph.Variable(2.0)

    assert session.run(graph.cond(True, lambda: w, lambda: -w)) == 2.0
    assert session.run(graph.cond(np.bool_(False), lambda: w, lambda: -w)) == -2.0


def test_branches_are_nested(session: graph.Session) -> None:
    x = graph.placeholder("float32", [])
    y = x * 1.0

    def positive() -> Any:
        twice = y * 2.0
        return graph.cond(twice > 10.0, lambda: twice + y, lambda: y - twice)

    z = graph.cond(x > 0.0, positive, lambda: y * y)
    slope = graph.gradients(z, x)

    found = [session.run([z, *slope], {x: value}) for value in (6.0, 4.0, -3.0)]

    assert found == [[18.0, 3.0], [-4.0, -1.0], [9.0, -6.0]]


def test_placeholders_of_both_branches_are_needed(session: graph.Session) -> None:
    x, z = graph.placeholder("float32", [], "x"), graph.placeholder("float32", [], "z")
    y = graph.cond(x > 0.0, lambda: x, lambda: z)

    with pytest.raises(ts.ArgumentError, match=r"(?s)`z`.*feed"):
        session.run(y, {x: 1.0})


def test_a_branch_sees_what_was_updated_before_it(session: graph.Session) -> None:
    p, w = graph.placeholder("bool", []), graph.Variable(1.0)
    before = graph.cond(p, lambda: w * 10.0, lambda: w)
    with graph.control_dependencies([w.assign_add(1.0)]):
        after = graph.cond(p, lambda: w * 10.0, lambda: w)

    assert session.run([before, after], {p: True}) == [10.0, 20.0]
    assert session.run([before, after], {p: False}) == [2.0, 3.0]


def test_a_value_is_chosen_for_an_assignment(session: graph.Session) -> None:
    x, best = graph.placeholder("float32", []), graph.Variable(0.0)
    keep = best.assign(graph.cond(x > best, lambda: x, lambda: best))

    for value in (3.0, 1.0, 5.0, 4.0):
        session.run(keep, {x: value})

    assert best.numpy() == 5.0


# Updates


def test_an_operation_is_done_if_its_branch_is_taken(session: graph.Session) -> None:
    x, w, count = graph.placeholder("float32", []), graph.Variable(1.0), graph.Variable(0)
    keep = graph.cond(
        x > w, lambda: graph.group(w.assign(x + w), count.assign_add(1)), graph.no_op, name="keep"
    )
    either = graph.cond(
        x > 0.0,
        lambda: graph.cond(x > 4.0, lambda: w.assign(-x), graph.no_op),
        lambda: [count.assign(9), None],
    )

    assert isinstance(keep, graph.Operation)
    assert session.run(["keep", w], {x: 2.0}) == [None, 1.0]  # values are those before updates
    assert (w.numpy(), count.numpy()) == (3.0, 1)
    session.run(keep, {x: 2.0})
    assert (w.numpy(), count.numpy()) == (3.0, 1)
    session.run(either, {x: 4.0})
    assert (w.numpy(), count.numpy()) == (3.0, 1)
    session.run(either, {x: 5.0})
    assert (w.numpy(), count.numpy()) == (-5.0, 1)
    session.run(either, {x: -5.0})
    assert (w.numpy(), count.numpy()) == (-5.0, 9)


def test_a_branch_of_operations_has_its_place_in_the_order(session: graph.Session) -> None:
    p, w = graph.placeholder("bool", []), graph.Variable(1.0)
    with graph.control_dependencies([w.assign_add(1.0)]):
        double = graph.cond(p, lambda: w.assign(w * 10.0), graph.no_op)
    with graph.control_dependencies([double]):
        after = w + 0.5

    assert session.run(after, {p: True}) == 20.5
    assert session.run(after, {p: False}) == 21.5


def test_a_training_step_is_made_or_left_out(session: graph.Session) -> None:
    x, p = graph.placeholder("float32", [None, 3]), graph.placeholder("bool", [])
    dense, adam = layers.Dense(2), keras.optimizers.Adam(0.1)
    loss = ops.mean((dense(x) - 1.0) ** 2)
    variables = dense.trainable_variables
    train = graph.cond(p, lambda: graph.train.minimize(adam, loss), graph.no_op)
    data, begin = normal(4, 3), values_of(variables)
    for flag in (True, False, True):
        session.run([train, loss], {x: data, p: flag})
    found = values_of(variables)

    for variable, value in zip(variables, begin, strict=True):
        variable.assign(value)
    model = keras.Sequential([keras.Input((3,)), dense])
    trainer = ts.Trainer(model, keras.optimizers.Adam(0.1), "mse")
    for _ in range(2):
        trainer.train_on_batch(data, np.ones((4, 2), "float32"))

    assert int(adam.iterations) == 2
    assert_same(found, values_of(variables), rtol=LAYERS, atol=LAYERS)


# Gradients and layers


def test_gradients_go_through_the_branch_that_is_taken(session: graph.Session) -> None:
    x, w = graph.placeholder("float32", [None]), graph.Variable(3.0)
    hidden = x * x
    y = graph.cond(ops.sum(x) > 3.0, lambda: hidden * w, lambda: 5.0 * x)
    by_all = graph.gradients(y, [w, x, hidden])

    dw, dx, dh = session.run(by_all, {x: [1.0, 4.0]})
    assert (dw, dx.tolist(), dh.tolist()) == (17.0, [6.0, 24.0], [3.0, 3.0])
    dw, dx, dh = session.run(by_all, {x: [1.0, 1.0]})
    assert (dw, dx.tolist(), dh.tolist()) == (0.0, [5.0, 5.0], [0.0, 0.0])


def test_an_infinite_slope_of_the_other_branch_does_no_harm(session: graph.Session) -> None:
    x, dense = graph.placeholder("float32", [1, 1]), layers.Dense(1, kernel_initializer="zeros")
    y = graph.cond(ops.sum(x) > 0.0, lambda: ops.log(dense(ops.sqrt(x))), lambda: 2.0 * x)
    by_both = graph.gradients(y, [x, graph.read(dense.kernel)])

    dx, dk = session.run(by_both, {x: [[0.0]]})

    assert (dx.item(), dk.item()) == (2.0, 0.0)


def test_layers_in_branches_are_trained_as_by_hand(session: graph.Session) -> None:
    x, p = graph.placeholder("float32", [None, 3]), graph.placeholder("bool", [])
    one, other = layers.Dense(2, activation="tanh"), layers.Dense(2)
    loss = ops.mean(graph.cond(p, lambda: one(x), lambda: other(x)) ** 2)
    variables = [*one.trainable_variables, *other.trainable_variables]
    train = graph.train.minimize(keras.optimizers.SGD(0.1), loss)
    data, begin = normal(4, 3), values_of(variables)

    @ts.function
    def step(x: Any, p: Any) -> Any:
        value, grads = ts.value_and_grad(
            lambda: ops.mean(ops.cond(p, lambda: one(x), lambda: other(x)) ** 2), variables
        )()
        for variable, gradient in zip(variables, grads, strict=True):
            variable.assign_sub(0.1 * gradient)
        return value

    losses = [step(data, np.bool_(flag)) for flag in (True, False, True)]
    wanted = values_of(variables)
    for variable, value in zip(variables, begin, strict=True):
        variable.assign(value)
    found = [session.run([train, loss], {x: data, p: flag})[1] for flag in (True, False, True)]

    assert len(variables) == 4
    assert_same(variables, wanted, rtol=LAYERS, atol=LAYERS)
    np.testing.assert_allclose(found, [host(value) for value in losses], rtol=LAYERS)


def test_random_numbers_and_statistics_move_only_if_they_are_taken(
    session: graph.Session,
) -> None:
    x, p = graph.placeholder("float32", [4, 2]), graph.placeholder("bool", [])
    norm, drop = layers.BatchNormalization(momentum=0.5), layers.Dropout(0.5, seed=1)
    y = graph.cond(
        p, lambda: drop(norm(x, training=True), training=True), lambda: x + graph.random_normal([2])
    )
    data, keep = normal(4, 2), graph.no_op()
    mean, seed = values_of([norm.moving_mean, drop.seed_generator.state])

    first = session.run([y, keep], {x: data, p: False})[0]
    assert (session.run([y, keep], {x: data, p: False})[0] != first).all()
    assert_same([norm.moving_mean, drop.seed_generator.state], [mean, seed], rtol=0, atol=0)
    session.run([y, keep], {x: data, p: True})
    np.testing.assert_allclose(host(norm.moving_mean), data.mean(0) / 2, rtol=LAYERS)
    assert (host(drop.seed_generator.state) != seed).any()


def test_gradients_of_gradients_go_through_a_branch(session: graph.Session) -> None:
    x, w = graph.placeholder("float32", []), graph.Variable(2.0)
    (slope,) = graph.gradients(graph.cond(x > 0.0, lambda: w**3.0 * x, lambda: w * x * x), w)
    second = graph.gradients(slope, [w, x])

    assert session.run([slope, *second], {x: 2.0}) == [24.0, 24.0, 12.0]
    assert session.run([slope, *second], {x: -3.0}) == [9.0, 0.0, -6.0]


def test_gradients_inside_a_branch_stay_inside(session: graph.Session) -> None:
    x, w = graph.placeholder("float32", []), graph.Variable(2.0)
    loss = w * w * x
    y = graph.cond(x > 0.0, lambda: graph.gradients(x**3.0, x)[0], lambda: x)
    outer = graph.cond(x > 0.0, lambda: graph.gradients(loss, w)[0] + 1.0, lambda: x)

    assert [session.run(y, {x: value}) for value in (2.0, -2.0)] == [12.0, -2.0]
    assert [session.run(outer, {x: value}) for value in (2.0, -2.0)] == [9.0, -2.0]


# What is refused


def refused(message: str) -> Any:
    return pytest.raises(ts.ArgumentError, match=rf"(?s)(?=.*to fix:   \S).*{message}")


@pytest.mark.plain
def test_a_predicate_is_a_boolean_without_axes() -> None:
    x = graph.placeholder("float32", [2], name="x")

    with refused(r"graph\.cond`: argument `pred`.*boolean.*`x` float32\[2\]"):
        graph.cond(x, lambda: x, lambda: x)
    with refused(r"`pred`.*bool\[2\].*keras\.ops\.any"):
        graph.cond(x > 0.0, lambda: x, lambda: x)


@pytest.mark.plain
@pytest.mark.parametrize(
    ("other", "got"),
    [
        (lambda x: (x, x), r"\(float32\[\?,2\], float32\[\?,2\]\)"),
        (lambda x: x[:, :1], r"float32\[\?,1\]"),
        (lambda x: ops.sum(x), r"float32\[\]"),
        (lambda x: ops.cast(x, "int32"), r"int32\[\?,2\]"),
    ],
    ids=["structure", "size", "axes", "dtype"],
)
def test_branches_return_the_same(other: Any, got: str) -> None:
    x = graph.placeholder("float32", [None, 2])

    with refused(rf"`false_fn`.*`true_fn` returns: float32\[\?,2\].*got: +{got}"):
        graph.cond(ops.sum(x) > 0.0, lambda: x * 2.0, lambda: other(x))


def test_branches_of_other_sizes_at_a_run(session: graph.Session, backend: str) -> None:
    x = graph.placeholder("float32", [None])
    y = graph.cond(ops.sum(x) > 0.0, lambda: x * 2.0, lambda: np.ones(3, "float32"))

    assert session.run(y, {x: [1.0, 2.0, 3.0]}).tolist() == [2.0, 4.0, 6.0]
    if backend == "tensorflow":
        assert session.run(y, {x: [1.0, 2.0]}).tolist() == [2.0, 4.0]
        return
    with refused(r"same shapes.*\(2,\)"):
        session.run(y, {x: [1.0, 2.0]})


@pytest.mark.plain
def test_branches_return_tensors() -> None:
    x = graph.placeholder("float32", [])

    with refused("`false_fn`.*got: +None"):
        graph.cond(x > 0.0, lambda: x, lambda: None)
    with refused("`true_fn`.*function that returns None"):
        graph.cond(x > 0.0, lambda: None, lambda: None)
    with refused("`false_fn`.*a function.*a Tensor"):
        graph.cond(x > 0.0, lambda: x, x)
    with refused(r"`true_fn`.*function that returns \[\]"):
        graph.cond(x > 0.0, lambda: [], lambda: [])


@pytest.mark.plain
def test_operations_stand_alone_and_are_made_inside() -> None:
    x, w = graph.placeholder("float32", [], "x"), graph.Variable(1.0)
    step = w.assign_add(x, name="step")

    with refused(r"`true_fn`.*makes itself.*`step`.*made outside"):
        graph.cond(x > 0.0, lambda: step, graph.no_op)
    with refused(r"`true_fn`.*`step`.*made outside"):
        graph.cond(x > 0.0, lambda: graph.group(step, w.assign(x)), graph.no_op)
    with refused(r"`false_fn`.*updates no variable.*an operation.*w\.assign\(graph\.cond"):
        graph.cond(x > 0.0, lambda: x, lambda: (w.assign(x), x)[1])
    with refused(r"`true_fn`.*updates no variable.*`assign"):
        graph.cond(x > 0.0, lambda: [w.assign(x), x], lambda: x)
    with refused(r"`false_fn`.*`true_fn` returns: <graph\.Operation assign.*got: +float32\[\]"):
        graph.cond(x > 0.0, lambda: w.assign(x), lambda: x)

    with refused(r"`true_fn`.*`assign.*which it does not return"):
        graph.cond(x > 0.0, lambda: (w.assign(x), None)[1], graph.no_op)

    def ordered() -> Any:
        with graph.control_dependencies([step]):
            return w * 2.0

    with refused("`true_fn`.*a `control_dependencies` inside"):
        graph.cond(x > 0.0, ordered, lambda: x)


@pytest.mark.plain
def test_gradients_that_leave_a_branch_are_refused() -> None:
    x, w = graph.placeholder("float32", []), graph.Variable(2.0)
    hidden = x * 3.0

    for by in (w, x):
        with refused(r"`true_fn`.*leaves the function.*graph\.gradients\(graph\.cond"):
            graph.cond(x > 0.0, lambda by=by: graph.gradients(w * hidden, by)[0], lambda: x)


def test_what_was_made_in_a_branch_is_not_used_outside(session: graph.Session) -> None:
    x, made = graph.placeholder("float32", []), []

    def branch() -> Any:
        made.append(graph.identity(x * 2.0, name="inner"))
        return made[0] + 1.0

    y = graph.cond(x > 0.0, branch, lambda: x)

    for fetch in (made[0], "inner", made[0] + 1.0, graph.cond(x > 0.0, lambda: made[0], lambda: x)):
        with refused(r"`fetches`.*graph\.cond.*return it"):
            session.run(fetch, {x: 1.0})
    with refused(r"`feed_dict`.*`inner`.*return it"):
        session.run(y, {x: 1.0, made[0]: 1.0})
    assert session.run(y, {x: 1.0}) == 3.0


def test_an_operation_of_a_branch_is_not_run_outside(session: graph.Session) -> None:
    p, w = graph.placeholder("bool", []), graph.Variable(1.0)
    graph.cond(p, lambda: w.assign_add(1.0, name="inner"), graph.no_op)

    with refused(r"`fetches`.*graph\.cond.*`inner`"):
        session.run("inner")
    assert w.numpy() == 1.0
