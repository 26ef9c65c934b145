"""`gradients` and clipping: by hand, by NumPy, and against `trainstep.value_and_grad`.

Numbers that float32 holds exactly are compared exactly. 1e-6 is for a handful of float32
operations, 1e-5 for sums over a batch and through layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import trainstep as ts
from tests.helpers import assert_same, host, normal, values_of
from trainstep import graph

ROUNDING = 1e-6
LAYERS = 1e-5


@pytest.fixture
def session() -> graph.Session:
    return graph.Session()


def mlp() -> keras.Model:
    return keras.Sequential(
        [keras.Input((3,)), layers.Dense(4, activation="tanh"), layers.Dense(1)]
    )


# By hand


def test_one_gradient_comes_for_each_x_in_their_order(session: graph.Session) -> None:
    x = graph.placeholder("float32", [2])
    a, b = graph.Variable([1.0, 2.0]), graph.Variable([3.0, 5.0])
    found = graph.gradients(ops.sum(a * a * b * x), [b, a])

    assert isinstance(found, list)
    assert [tuple(g.shape) for g in found] == [(2,), (2,)]
    assert all(isinstance(g, keras.KerasTensor) for g in found)
    db, da = session.run(found, {x: [1.0, 2.0]})
    np.testing.assert_array_equal(db, [1.0, 8.0])
    np.testing.assert_array_equal(da, [6.0, 40.0])


def test_a_single_x_gives_a_list_of_one(session: graph.Session) -> None:
    v = graph.Variable(3.0)

    assert session.run(graph.gradients(v * v, v)) == [6.0]


def test_several_ys_with_and_without_axes_are_summed(session: graph.Session) -> None:
    x, v = graph.placeholder("float32", [None]), graph.Variable([1.0, 2.0])

    (dv,) = session.run(graph.gradients([v * v, 3.0 * v, v[0] * x], [v]), {x: [1.0, 2.0, 3.0]})

    np.testing.assert_array_equal(dv, [2.0 + 3.0 + 6.0, 4.0 + 3.0])


def test_a_variable_of_keras_and_one_of_the_graph_stand_side_by_side(
    session: graph.Session,
) -> None:
    x = graph.placeholder("float32", [None, 2])
    dense, v = layers.Dense(1, use_bias=False), graph.Variable(2.0)
    loss = ops.sum(dense(x)) * v
    theirs = keras.Variable(5.0)

    dk, dv, dt = graph.gradients(loss * theirs, [dense.kernel, v.variable, theirs])
    data = np.array([[1.0, 2.0], [3.0, 4.0]], "float32")
    dk, dv, dt, value = session.run([dk, dv, dt, loss], {x: data})

    np.testing.assert_array_equal(dk, [[40.0], [60.0]])
    np.testing.assert_allclose(dv, 5.0 * value / 2.0, rtol=ROUNDING)
    np.testing.assert_allclose(dt, value, rtol=ROUNDING)


def test_placeholders_and_intermediates_are_differentiated_by(session: graph.Session) -> None:
    x = graph.placeholder("float32", [None])
    hidden = x * x
    y = ops.sum(hidden * hidden)

    dx, dh = session.run(graph.gradients(y, [x, hidden]), {x: [1.0, 2.0]})

    np.testing.assert_array_equal(dx, [4.0, 32.0])
    np.testing.assert_array_equal(dh, [2.0, 8.0])


def test_what_is_not_connected_has_zeros(session: graph.Session) -> None:
    x, z = graph.placeholder("float32", [None, 2]), graph.placeholder("float32", [None])
    used, unused = graph.Variable(3.0), graph.Variable(np.ones((2, 3), "float32"))
    stopped = graph.Variable(2.0)
    later = x * 2.0
    y = used * ops.sum(x) + ops.stop_gradient(stopped) * used

    values = session.run(
        graph.gradients(y, [unused, used, stopped, later]), {x: [[1.0, 2.0]], z: [1.0]}
    )

    np.testing.assert_array_equal(values[0], np.zeros((2, 3)))
    assert values[1] == 5.0
    assert values[2] == 0.0
    np.testing.assert_array_equal(values[3], np.zeros((1, 2)))


def test_a_gradient_keeps_the_dtype_of_its_x(session: graph.Session) -> None:
    half = graph.Variable([1.0, 2.0], dtype="float16")
    loss = ops.sum(ops.cast(half, "float32") ** 2)
    (gradient,) = graph.gradients(loss, [half])

    value = session.run(gradient)

    assert gradient.dtype == "float16"
    assert value.dtype == "float16"
    np.testing.assert_array_equal(value, [2.0, 4.0])


def test_names_are_taken(session: graph.Session) -> None:
    v = graph.Variable([1.0, 2.0])
    (dv,) = graph.gradients(ops.sum(v * v), [v], name="slope")

    assert "slope" in dv.name
    np.testing.assert_array_equal(session.run(dv.name), [2.0, 4.0])


# Of layers, and of gradients


def test_gradients_of_a_model_are_those_of_value_and_grad(session: graph.Session) -> None:
    model, data, target = mlp(), normal(6, 3), normal(6, 1, seed=1)
    x, y = graph.placeholder("float32", [None, 3]), graph.placeholder("float32", [None, 1])
    loss = ops.mean(keras.losses.mean_squared_error(y, model(x)))
    found = session.run(
        [loss, graph.gradients(loss, model.trainable_variables)], {x: data, y: target}
    )

    def by_hand() -> Any:
        return ops.mean(keras.losses.mean_squared_error(target, model(data)))

    value, wanted = ts.value_and_grad(by_hand, model.trainable_variables)()
    np.testing.assert_allclose(found[0], host(value), rtol=LAYERS)
    assert_same(found[1], wanted, rtol=LAYERS, atol=ROUNDING)


def test_second_derivatives(session: graph.Session) -> None:
    x = graph.placeholder("float32", [])
    (first,) = graph.gradients(x**3, [x])
    (second,) = graph.gradients(first, [x])
    (third,) = graph.gradients(second * x, [x])

    found = session.run([first, second, third], {x: 2.0})

    assert found == [12.0, 12.0, 24.0]
    assert session.run(third, {x: 1.0}) == 12.0


def test_mixed_second_derivatives_by_variables(session: graph.Session) -> None:
    a, b = graph.Variable(2.0), graph.Variable(3.0)
    da, db = graph.gradients(a * a * b, [a, b])  # 2ab, a^2
    rows = [graph.gradients(d, [a, b]) for d in (da, db)]

    assert session.run(rows) == [[6.0, 4.0], [4.0, 0.0]]


def test_a_gradient_penalty_is_that_of_nested_value_and_grad(session: graph.Session) -> None:
    critic, data = mlp(), normal(5, 3)
    weights = critic.trainable_variables
    x = graph.placeholder("float32", [None, 3])
    (slope,) = graph.gradients(critic(x), [x])
    penalty = ops.mean(ops.square(ops.sqrt(ops.sum(slope * slope, axis=1)) - 1.0))
    found = session.run([penalty, graph.gradients(penalty, weights)], {x: data})

    def by_hand() -> Any:
        inner = ts.grad(lambda a: ops.sum(critic(a)), argnums=0)(data)
        return ops.mean(ops.square(ops.sqrt(ops.sum(inner * inner, axis=1)) - 1.0))

    value, wanted = ts.value_and_grad(by_hand, weights)()
    np.testing.assert_allclose(found[0], host(value), rtol=LAYERS)
    assert_same(found[1], wanted, rtol=LAYERS, atol=ROUNDING)
    assert np.abs(found[1][0]).max() > 0


def test_the_two_updates_of_a_gan_start_from_the_same_weights(session: graph.Session) -> None:
    generator, critic = mlp(), keras.Sequential([keras.Input((1,)), layers.Dense(1)])
    noise, real = normal(4, 3), normal(4, 1, seed=1)
    z, x = graph.placeholder("float32", [None, 3]), graph.placeholder("float32", [None, 1])
    fake = generator(z)
    d_loss = ops.mean(critic(fake)) - ops.mean(critic(x)) + ops.mean(ops.square(critic(x)))
    g_loss = -ops.mean(critic(fake))
    d_vars, g_vars = critic.trainable_variables, generator.trainable_variables
    before = values_of([*d_vars, *g_vars])

    def losses() -> tuple[Any, Any]:
        made = critic(generator(noise))
        real_score = critic(real)
        d = ops.mean(made) - ops.mean(real_score) + ops.mean(ops.square(real_score))
        return d, -ops.mean(made)

    d_value, d_wanted = ts.value_and_grad(lambda: losses()[0], d_vars)()
    g_value, g_wanted = ts.value_and_grad(lambda: losses()[1], g_vars)()
    gradients = [host(g) for g in (*d_wanted, *g_wanted)]

    d_train = graph.train.minimize(keras.optimizers.SGD(0.1), d_loss, var_list=d_vars)
    g_train = graph.train.minimize(keras.optimizers.SGD(0.2), g_loss, var_list=g_vars)
    found = session.run([d_train, g_train, d_loss, g_loss], {z: noise, x: real})

    np.testing.assert_allclose(found[2:], [host(d_value), host(g_value)], rtol=LAYERS, atol=LAYERS)
    rates = [0.1] * len(d_vars) + [0.2] * len(g_vars)
    wanted = [w - r * g for w, r, g in zip(before, rates, gradients, strict=True)]
    assert_same([*d_vars, *g_vars], wanted, rtol=LAYERS, atol=ROUNDING)


# Clipping

NUMBERS = [normal(3, 4, seed=1), normal(5, seed=2), normal(seed=3)]
NORM = float(np.sqrt(sum(np.sum(a.astype("float64") ** 2) for a in NUMBERS)))


def constants(arrays: Sequence[np.ndarray]) -> list[Any]:
    return [graph.constant(a) for a in arrays]


@pytest.mark.parametrize("limit", [0.5, 100.0], ids=["beyond", "within"])
def test_clipping_by_the_global_norm_gives_the_norm_before(
    session: graph.Session, limit: float
) -> None:
    clipped, norm = graph.clip_by_global_norm(constants(NUMBERS), limit)

    values, value, alone = session.run([clipped, norm, graph.global_norm(constants(NUMBERS))])

    np.testing.assert_allclose([value, alone], [NORM, NORM], rtol=ROUNDING)
    factor = min(1.0, limit / NORM)
    assert_same(values, [factor * a for a in NUMBERS], rtol=ROUNDING, atol=0)


def test_a_limit_may_be_fed(session: graph.Session) -> None:
    limit = graph.placeholder("float32", [])
    clipped, _ = graph.clip_by_global_norm(constants(NUMBERS), limit)

    for value in (0.5, 1.0):
        assert_same(
            session.run(clipped, {limit: value}),
            [value / NORM * a for a in NUMBERS],
            rtol=ROUNDING,
            atol=0,
        )


def test_clipping_by_norm_is_each_tensors_own(session: graph.Session) -> None:
    a, b = np.array([3.0, 4.0], "float32"), np.array([0.3, 0.4], "float32")
    found = session.run([graph.clip_by_norm(c, 1.0) for c in constants([a, b, 0 * a])])

    np.testing.assert_allclose(found[0], [0.6, 0.8], rtol=ROUNDING)
    np.testing.assert_allclose(found[1], b, rtol=ROUNDING)
    np.testing.assert_array_equal(found[2], [0.0, 0.0])


def test_clipping_by_value_is_numpys(session: graph.Session) -> None:
    found = session.run(graph.clip_by_value(graph.constant(NUMBERS[0]), -0.5, 0.25))

    np.testing.assert_array_equal(found, np.clip(NUMBERS[0], -0.5, 0.25).astype("float32"))


def test_zeros_are_clipped_to_zeros(session: graph.Session) -> None:
    clipped, norm = graph.clip_by_global_norm(constants([np.zeros(3, "float32")]), 1.0)

    values, value = session.run([clipped, norm])

    np.testing.assert_array_equal(values[0], np.zeros(3))
    assert value == 0.0
