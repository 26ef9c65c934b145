"""Gradients: by variables and arguments, nested, with updates inside, and what is refused.

Tolerances: 1e-6 where float32 computes a handful of operations, 1e-5 where it sums over a batch
and through layers; wider ones say why. Numbers that float32 holds exactly are compared exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import trainstep as ts
from tests.helpers import assert_same, host, normal, values_of


def plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a test's function as it is, where `ts.function` would compile it."""
    return fn


@pytest.fixture(params=[plain, ts.function], ids=["outside", "inside"])
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Outside and inside of a `ts.function`: every promise holds in both."""
    return request.param


def array(*numbers: Any) -> np.ndarray:
    return np.array(numbers, "float32")


def tensor(*numbers: Any) -> Any:
    return ops.convert_to_tensor(array(*numbers))


# By variables


def test_gradients_by_variables_come_in_the_order_asked_for(run: Callable[..., Any]) -> None:
    a, b = keras.Variable([1.0, 2.0]), keras.Variable([3.0, 5.0])

    @run
    def both() -> Any:
        return ts.value_and_grad(lambda: ops.sum(a * a * b), [b, a])()

    value, (db, da) = both()

    assert float(host(value)) == 23.0
    np.testing.assert_array_equal(host(db), [1.0, 4.0])
    np.testing.assert_array_equal(host(da), [6.0, 20.0])


def test_grad_is_value_and_grad_without_the_value(run: Callable[..., Any]) -> None:
    a = keras.Variable([1.0, 2.0])

    @run
    def gradient() -> Any:
        return ts.grad(lambda: ops.sum(a * a), [a])()

    (da,) = gradient()

    np.testing.assert_array_equal(host(da), [2.0, 4.0])


def test_arguments_reach_the_function_by_position_and_by_name(run: Callable[..., Any]) -> None:
    w = keras.Variable(2.0)

    def affine(x: Any, *, scale: Any, offset: Any = 1.0) -> Any:
        return scale * w * x + offset

    @run
    def both(x: Any) -> Any:
        return ts.value_and_grad(affine, [w])(x, scale=3.0)

    value, (dw,) = both(array(5.0)[0])

    assert float(host(value)) == 31.0
    assert float(host(dw)) == 15.0


def test_without_variables_the_trainable_ones_read_come_in_reading_order(
    run: Callable[..., Any],
) -> None:
    first, second = keras.Variable(2.0), keras.Variable(3.0)
    constant = keras.Variable(5.0, trainable=False)
    unread = keras.Variable(7.0)

    @run
    def both() -> Any:
        return ts.value_and_grad(lambda: second * constant * first * second)()

    value, gradients = both()

    assert float(host(value)) == 90.0
    assert [float(host(g)) for g in gradients] == [60.0, 45.0]  # second, then first
    assert float(host(unread)) == 7.0


def test_a_non_trainable_variable_that_is_asked_for_has_its_gradient(
    run: Callable[..., Any],
) -> None:
    w = keras.Variable(2.0)
    constant = keras.Variable(5.0, trainable=False)

    @run
    def both() -> Any:
        return ts.value_and_grad(lambda: w * constant * constant, [constant, w])()

    _, (d_constant, dw) = both()

    assert (float(host(d_constant)), float(host(dw))) == (20.0, 25.0)
    assert not constant.trainable


def test_the_gradient_of_a_frozen_layer_that_is_asked_for_is_its_gradient(
    run: Callable[..., Any],
) -> None:
    layer = layers.Dense(1, use_bias=False)
    layer.build((None, 2))
    layer.trainable = False
    x = array([1.0, 2.0], [3.0, 4.0])

    @run
    def gradient(x: Any) -> Any:
        return ts.grad(lambda: ops.sum(layer(x)), [layer.kernel])()

    (dk,) = gradient(ops.convert_to_tensor(x))

    np.testing.assert_array_equal(host(dk), [[4.0], [6.0]])


def test_an_unconnected_variable_has_a_gradient_of_zeros(run: Callable[..., Any]) -> None:
    used = keras.Variable(3.0)
    read_only = keras.Variable(np.ones((2, 3), "float32"))
    unused = keras.Variable(np.ones((4,), "float16"), dtype="float16")

    def square() -> Any:
        ops.sum(read_only * 2.0)  # read, and dropped
        return used * used

    @run
    def gradients() -> Any:
        return ts.grad(square, [unused, used, read_only])()

    d_unused, d_used, d_read = gradients()

    np.testing.assert_array_equal(host(d_unused), np.zeros(4))
    np.testing.assert_array_equal(host(d_read), np.zeros((2, 3)))
    assert float(host(d_used)) == 6.0
    assert keras.backend.standardize_dtype(d_unused.dtype) == "float16"


def test_a_value_that_depends_on_nothing_has_gradients_of_zeros(run: Callable[..., Any]) -> None:
    w = keras.Variable([1.0, 2.0])

    @run
    def gradient() -> Any:
        return ts.value_and_grad(lambda: ops.convert_to_tensor(4.0), [w])()

    value, (dw,) = gradient()

    assert float(host(value)) == 4.0
    np.testing.assert_array_equal(host(dw), [0.0, 0.0])


def test_stop_gradient_stops(run: Callable[..., Any]) -> None:
    w = keras.Variable(3.0)

    @run
    def gradient() -> Any:
        return ts.grad(lambda: w * ops.stop_gradient(w * w), [w])()

    assert float(host(gradient()[0])) == 9.0


def test_an_embedding_has_a_dense_gradient_with_repeated_words_summed(
    run: Callable[..., Any],
) -> None:
    layer = layers.Embedding(4, 2)
    layer.build((None,))
    words = np.array([1, 3, 1], "int32")

    @run
    def gradient(words: Any) -> Any:
        gradients = ts.grad(lambda: ops.sum(layer(words)), layer.trainable_variables)()
        return gradients, ts.global_norm(gradients)

    (d_table,), norm = gradient(ops.convert_to_tensor(words))

    np.testing.assert_array_equal(host(d_table), [[0, 0], [2, 2], [0, 0], [1, 1]])
    np.testing.assert_allclose(float(host(norm)), np.sqrt(10.0), rtol=1e-6)


def test_variables_may_be_a_function_for_a_model_that_builds_itself(
    run: Callable[..., Any],
) -> None:
    model = keras.Sequential([layers.Dense(3, activation="tanh"), layers.Dense(1)])
    x = normal(4, 2)

    @run
    def both(x: Any) -> Any:
        loss = lambda: ops.mean(model(x, training=True))  # noqa: E731
        return ts.value_and_grad(loss, lambda: model.trainable_variables)()

    _, gradients = both(ops.convert_to_tensor(x))

    assert [g.shape for g in gradients] == [v.shape for v in model.trainable_variables]
    np.testing.assert_allclose(host(gradients[-1]), [1.0], rtol=1e-6)  # of the last bias


# By arguments


def test_gradient_by_one_argument_has_its_structure(run: Callable[..., Any]) -> None:
    gradient = run(ts.grad(lambda x, y: ops.sum(x * x * y), argnums=0))

    dx = gradient(tensor(1.0, 2.0), tensor(3.0, 5.0))

    np.testing.assert_array_equal(host(dx), [6.0, 20.0])


def test_gradients_by_several_arguments_are_a_tuple_in_the_order_asked_for(
    run: Callable[..., Any],
) -> None:
    gradient = run(ts.grad(lambda x, y, z: ops.sum(x * x * y * z), argnums=(2, 0)))

    gradients = gradient(tensor(1.0, 2.0), tensor(3.0, 5.0), tensor(1.0, 1.0))

    assert isinstance(gradients, tuple)
    np.testing.assert_array_equal(host(gradients[0]), [3.0, 20.0])
    np.testing.assert_array_equal(host(gradients[1]), [6.0, 20.0])


def test_one_argument_as_a_sequence_gives_a_tuple_of_one(run: Callable[..., Any]) -> None:
    gradients = run(ts.grad(lambda x: ops.sum(x * x), argnums=[0]))(array(1.0, 2.0))

    assert isinstance(gradients, tuple)
    np.testing.assert_array_equal(host(gradients[0]), [2.0, 4.0])


def test_a_nested_argument_has_nested_gradients(run: Callable[..., Any]) -> None:
    def value(parameters: Any, x: Any) -> Any:
        w, b = parameters["layer"]
        return ops.sum(x * w + b) * parameters["scale"]

    parameters = {"layer": [array(1.0, 2.0), array(0.5, 0.5)], "scale": array(3.0)[0]}
    gradients = run(ts.grad(value, argnums=0))(parameters, tensor(4.0, 6.0))

    assert set(gradients) == {"layer", "scale"}
    np.testing.assert_array_equal(host(gradients["layer"][0]), [12.0, 18.0])
    np.testing.assert_array_equal(host(gradients["layer"][1]), [3.0, 3.0])
    assert float(host(gradients["scale"])) == 17.0


def test_an_argument_that_does_not_matter_has_a_gradient_of_zeros(
    run: Callable[..., Any],
) -> None:
    dx, dy = run(ts.grad(lambda x, y: ops.sum(x), argnums=(0, 1)))(array(1.0, 2.0), array(3.0))

    np.testing.assert_array_equal(host(dx), [1.0, 1.0])
    np.testing.assert_array_equal(host(dy), [0.0])


def test_numpy_arrays_may_stand_beside_the_argument_differentiated_by(
    run: Callable[..., Any],
) -> None:
    """One text on three engines: a torch tensor does not multiply a NumPy array by itself."""
    dx = run(ts.grad(lambda x, y: ops.sum(x * x * y), argnums=0))(array(1.0, 2.0), array(3.0, 5.0))

    np.testing.assert_array_equal(host(dx), [6.0, 20.0])


def test_a_python_float_can_be_differentiated_by(run: Callable[..., Any]) -> None:
    value, dx = run(ts.value_and_grad(lambda x: x * x * x, argnums=0))(2.0)

    assert (float(host(value)), float(host(dx))) == (8.0, 12.0)


def test_gradient_by_an_input_of_a_model(run: Callable[..., Any]) -> None:
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1, use_bias=False)])
    kernel = host(model.weights[0])

    dx = run(ts.grad(lambda x: ops.sum(model(x)), argnums=0))(normal(2, 3))

    np.testing.assert_allclose(host(dx), np.repeat(kernel.T, 2, axis=0), rtol=1e-6)


# Aux


def test_aux_comes_back_beside_the_value(run: Callable[..., Any]) -> None:
    w = keras.Variable(3.0)

    @run
    def both(x: Any) -> Any:
        def loss() -> Any:
            y = w * x
            return ops.sum(y), {"y": y, "twice": [2.0 * y]}

        return ts.value_and_grad(loss, [w], has_aux=True)()

    (value, aux), (dw,) = both(array(1.0, 2.0))

    assert (float(host(value)), float(host(dw))) == (9.0, 3.0)
    np.testing.assert_array_equal(host(aux["y"]), [3.0, 6.0])
    np.testing.assert_array_equal(host(aux["twice"][0]), [6.0, 12.0])


def test_grad_with_aux_returns_gradients_then_aux(run: Callable[..., Any]) -> None:
    dx, aux = run(ts.grad(lambda x: (ops.sum(x * x), x + 1.0), argnums=0, has_aux=True))(
        array(1.0, 2.0)
    )

    np.testing.assert_array_equal(host(dx), [2.0, 4.0])
    np.testing.assert_array_equal(host(aux), [2.0, 3.0])


# Second derivatives


def test_the_third_power_has_its_three_derivatives(run: Callable[..., Any]) -> None:
    first = ts.grad(lambda x: x**3, argnums=0)
    second = ts.grad(first, argnums=0)
    third = ts.grad(second, argnums=0)

    @run
    def all_three(x: Any) -> Any:
        return first(x), second(x), third(x)

    assert [float(host(d)) for d in all_three(2.0)] == [12.0, 12.0, 6.0]


def test_second_derivative_by_a_variable(run: Callable[..., Any]) -> None:
    w = keras.Variable(2.0)

    @run
    def second() -> Any:
        return ts.value_and_grad(lambda: ts.grad(lambda: w**3, [w])()[0], [w])()

    value, (dw,) = second()

    assert (float(host(value)), float(host(dw))) == (12.0, 12.0)


def test_hessian_times_vector(run: Callable[..., Any]) -> None:
    """f(x) = sum tanh(A x): the Hessian is A' diag(t'') A with t'' = -2 t (1 - t^2)."""
    a, x, v = normal(4, 3, seed=1), normal(3, seed=2), normal(3, seed=3)

    @run
    def product(x: Any, v: Any) -> Any:
        gradient = ts.grad(lambda x: ops.sum(ops.tanh(ops.matmul(a, x))), argnums=0)
        return ts.grad(lambda x: ops.sum(gradient(x) * v), argnums=0)(x)

    t = np.tanh(a.astype("float64") @ x)
    wanted = a.T @ (-2 * t * (1 - t**2) * (a @ v))
    got = product(ops.convert_to_tensor(x), ops.convert_to_tensor(v))
    np.testing.assert_allclose(host(got), wanted, rtol=1e-5, atol=1e-6)


def test_mixed_derivative_by_an_argument_then_a_variable(run: Callable[..., Any]) -> None:
    w = keras.Variable(3.0)

    @run
    def mixed(x: Any) -> Any:
        return ts.grad(lambda: ts.grad(lambda x: w * w * x**3, argnums=0)(x), [w])()

    (d,) = mixed(2.0)  # d/dw d/dx w^2 x^3 = 6 w x^2

    assert float(host(d)) == 72.0


# A gradient penalty


def penalty_of(critic: Callable[[Any], Any], x: Any) -> Any:
    """WGAN-GP: the mean of (|d critic / d x| - 1)^2."""
    slopes = ts.grad(lambda x: ops.sum(critic(x)), argnums=0)(x)
    norms = ops.sqrt(ops.sum(ops.square(slopes), axis=-1))
    return ops.mean(ops.square(norms - 1.0))


def test_gradient_penalty_of_a_linear_critic_is_known(run: Callable[..., Any]) -> None:
    w = keras.Variable([[3.0], [4.0]])  # its slope is w everywhere: |w| = 5

    @run
    def both(x: Any) -> Any:
        return ts.value_and_grad(lambda: penalty_of(lambda x: ops.matmul(x, w), x), [w])()

    value, (dw,) = both(ops.convert_to_tensor(normal(6, 2)))

    np.testing.assert_allclose(float(host(value)), 16.0, rtol=1e-6)
    np.testing.assert_allclose(host(dw), [[2 * 4 * 0.6], [2 * 4 * 0.8]], rtol=1e-6)


def test_gradient_penalty_agrees_with_finite_differences(run: Callable[..., Any]) -> None:
    """The reference: central differences in float64 of the penalty written out by hand."""
    start = [normal(3, 5, seed=1), normal(5, seed=2), normal(5, 1, seed=3)]
    x = normal(6, 3, seed=4)
    critic = keras.Sequential(
        [keras.Input((3,)), layers.Dense(5, activation="tanh"), layers.Dense(1, use_bias=False)]
    )
    critic.set_weights(start)

    def by_hand(w: list[np.ndarray]) -> float:
        hidden = np.tanh(x @ w[0] + w[1])
        slopes = ((1 - hidden**2) * w[2][:, 0]) @ w[0].T
        return float(np.mean((np.sqrt(np.sum(slopes**2, -1)) - 1) ** 2))

    def differences(i: int, eps: float = 1e-5) -> np.ndarray:
        result = np.zeros(start[i].shape)
        for at in np.ndindex(*start[i].shape):
            w = [a.astype("float64") for a in start]
            w[i][at] += eps
            above = by_hand(w)
            w[i][at] -= 2 * eps
            result[at] = (above - by_hand(w)) / (2 * eps)
        return result

    @run
    def gradients(x: Any) -> Any:
        return ts.grad(lambda: penalty_of(critic, x), critic.trainable_variables)()

    got = gradients(ops.convert_to_tensor(x))

    for i, g in enumerate(got):
        wanted = differences(i)
        # the differences are good to 1e-9; float32 through two derivatives to about 1e-6
        np.testing.assert_allclose(host(g), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_a_wgan_critic_trains_with_a_gradient_penalty() -> None:
    critic = keras.Sequential([layers.Dense(8, activation="tanh"), layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.02, beta_1=0.5)

    @ts.function(max_traces=1)
    def step(real: Any, fake: Any, mix: Any) -> Any:
        def loss() -> Any:
            distance = ops.mean(critic(fake)) - ops.mean(critic(real))
            penalty = penalty_of(critic, mix * real + (1.0 - mix) * fake)
            return distance + 10.0 * penalty, penalty

        (value, penalty), gradients = ts.value_and_grad(
            loss, lambda: critic.trainable_variables, has_aux=True
        )()
        optimizer.apply(gradients, critic.trainable_variables)
        return value, penalty

    rng = np.random.default_rng(0)
    losses, penalties = [], []
    for _ in range(60):
        real = rng.normal(1.0, 0.3, (16, 2)).astype("float32")
        fake = rng.normal(-1.0, 0.3, (16, 2)).astype("float32")
        value, penalty = step(real, fake, rng.random((16, 1)).astype("float32"))
        losses.append(float(host(value)))
        penalties.append(float(host(penalty)))

    # The critic has to tell the two apart (a distance of 2.8 at slope 1) and keep its slope near 1.
    assert np.isfinite(losses).all()
    assert np.mean(losses[-5:]) < -1.5 < np.mean(losses[:1])
    assert np.mean(penalties[-5:]) < 0.05


# Updates inside


def test_updates_inside_take_effect_exactly_once(run: Callable[..., Any]) -> None:
    calls = keras.Variable(0, dtype="int32", trainable=False)
    norm = layers.BatchNormalization(momentum=0.5)
    norm.build((None, 2))
    metric = keras.metrics.Mean()
    generator = keras.random.SeedGenerator(5)
    x = array([1.0, 2.0], [3.0, 6.0])

    @run
    def both(x: Any) -> Any:
        def loss() -> Any:
            calls.assign_add(1)
            noise = keras.random.uniform((2,), seed=generator)
            y = norm(x, training=True)
            metric.update_state(x)
            return ops.sum(y * noise)

        return ts.value_and_grad(loss, norm.trainable_variables)()

    for times in (1, 2):
        both(ops.convert_to_tensor(x))
        kept = 0.5**times
        assert int(host(calls)) == times
        np.testing.assert_array_equal(host(generator.state), [5, times])
        np.testing.assert_allclose(host(norm.moving_mean), (1 - kept) * array(2.0, 4.0), rtol=1e-6)
        np.testing.assert_allclose(
            host(norm.moving_variance), kept + (1 - kept) * array(1.0, 4.0), rtol=1e-6
        )
        assert float(host(metric.count)) == 2.0 * times  # two rows a call
        assert float(host(metric.result())) == 3.0


def test_updates_inside_a_nested_gradient_take_effect_exactly_once(
    run: Callable[..., Any],
) -> None:
    calls = keras.Variable(0.0, trainable=False)

    def cube(x: Any) -> Any:
        calls.assign_add(1.0)
        return x**3

    @run
    def second(x: Any) -> Any:
        return ts.grad(ts.grad(cube, argnums=0), argnums=0)(x)

    assert float(host(second(2.0))) == 12.0
    assert float(host(calls)) == 1.0


def test_an_update_is_seen_by_what_follows_it(run: Callable[..., Any]) -> None:
    w, seen = keras.Variable(3.0), keras.Variable(0.0, trainable=False)

    @run
    def both() -> Any:
        def loss() -> Any:
            seen.assign(w * 2.0)
            return w * ops.stop_gradient(seen.value)

        value, gradients = ts.value_and_grad(loss, [w])()
        return value, gradients, seen + 1.0

    value, (dw,), after = both()

    assert (float(host(value)), float(host(dw)), float(host(after))) == (18.0, 6.0, 7.0)
    assert float(host(seen)) == 6.0


def test_a_variable_may_be_written_after_it_was_read(run: Callable[..., Any]) -> None:
    w = keras.Variable(3.0)

    @run
    def both() -> Any:
        def loss() -> Any:
            square = w * w
            w.assign(10.0)
            return square

        return ts.value_and_grad(loss, [w])()

    value, (dw,) = both()

    assert (float(host(value)), float(host(dw)), float(host(w))) == (9.0, 6.0, 10.0)


def test_gradients_outside_a_function_train_a_model() -> None:
    w = keras.Variable([4.0])
    optimizer = keras.optimizers.SGD(0.25)

    for _ in range(2):
        gradients = ts.grad(lambda: ops.sum(w * w), [w])()
        optimizer.apply(gradients, [w])

    np.testing.assert_array_equal(host(w), [1.0])  # halved twice


def test_a_failure_inside_leaves_every_variable_as_it_was(run: Callable[..., Any]) -> None:
    w, calls = keras.Variable(3.0), keras.Variable(0.0, trainable=False)
    fail = [True]

    def loss() -> Any:
        calls.assign_add(1.0)
        if fail[0]:
            raise RuntimeError("no")
        return w * w

    step = run(lambda: ts.value_and_grad(loss, [w])())
    with pytest.raises(RuntimeError, match="no"):
        step()
    assert float(host(calls)) == 0.0

    fail[0] = False
    step()
    assert float(host(calls)) == 1.0


# What is refused


def test_no_variables_is_refused(run: Callable[..., Any]) -> None:
    step = run(lambda: ts.value_and_grad(lambda: ops.convert_to_tensor(1.0), [])())

    with pytest.raises(ts.GradientError, match="variables"):
        step()


def test_reading_no_trainable_variable_without_naming_any_is_refused(
    run: Callable[..., Any],
) -> None:
    constant = keras.Variable(1.0, trainable=False)
    step = run(lambda: ts.value_and_grad(lambda: constant * 2.0)())

    with pytest.raises(ts.GradientError, match="trainable"):
        step()


def test_a_value_that_is_not_a_scalar_is_refused_with_its_shape(run: Callable[..., Any]) -> None:
    w = keras.Variable([1.0, 2.0, 3.0])
    step = run(lambda: ts.value_and_grad(lambda: w * w, [w])())

    with pytest.raises(ts.GradientError, match="scalar") as caught:
        step()

    assert "3" in str(caught.value)  # the shape that came


def test_aux_that_is_not_there_is_refused(run: Callable[..., Any]) -> None:
    w = keras.Variable(1.0)
    step = run(lambda: ts.value_and_grad(lambda: w * w, [w], has_aux=True)())

    with pytest.raises(ts.GradientError, match="has_aux"):
        step()


def test_a_pair_without_has_aux_is_refused_and_has_aux_is_named(run: Callable[..., Any]) -> None:
    w = keras.Variable(1.0)
    step = run(lambda: ts.value_and_grad(lambda: (w * w, w + 1.0), [w])())

    with pytest.raises(ts.GradientError, match="has_aux"):
        step()


def test_variables_and_argnums_together_are_refused() -> None:
    w = keras.Variable(1.0)

    with pytest.raises(ts.GradientError, match="argnums"):
        ts.value_and_grad(lambda x: w * x, [w], argnums=0)(1.0)


def test_an_argument_that_is_not_there_is_refused() -> None:
    with pytest.raises(ts.GradientError, match="argnums"):
        ts.value_and_grad(lambda x: x * x, argnums=1)(1.0)


def test_a_refusal_changes_nothing(run: Callable[..., Any]) -> None:
    w, calls = keras.Variable([1.0, 2.0]), keras.Variable(0.0, trainable=False)

    def loss() -> Any:
        calls.assign_add(1.0)
        return w * w  # not a scalar

    step = run(lambda: ts.value_and_grad(loss, [w])())
    with pytest.raises(ts.GradientError):
        step()

    assert float(host(calls)) == 0.0


# Norms


def structure() -> dict[str, Any]:
    return {"a": normal(3, 4, seed=1), "b": [normal(5, seed=2), (normal(2, 2, seed=3),)]}


def leaves(gradients: Any) -> list[np.ndarray]:
    return [host(gradients["a"]), host(gradients["b"][0]), host(gradients["b"][1][0])]


def numpy_norm(arrays: list[np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(a.astype("float64") ** 2) for a in arrays)))


def test_global_norm_is_that_of_all_gradients_together(run: Callable[..., Any]) -> None:
    norm = run(ts.global_norm)(structure())

    np.testing.assert_allclose(float(host(norm)), numpy_norm(leaves(structure())), rtol=1e-6)


@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
def test_clipping_scales_all_by_one_factor(run: Callable[..., Any], as_tensor: bool) -> None:
    limit = ops.convert_to_tensor(0.5) if as_tensor else 0.5
    wanted = [a * (0.5 / numpy_norm(leaves(structure()))) for a in leaves(structure())]

    clipped = run(ts.clip_by_global_norm)(structure(), limit)

    assert_same(leaves(clipped), wanted, rtol=1e-6, atol=0)
    np.testing.assert_allclose(numpy_norm(leaves(clipped)), 0.5, rtol=1e-6)
    assert isinstance(clipped["b"], list)
    assert isinstance(clipped["b"][1], tuple)


def test_clipping_leaves_gradients_within_the_limit_unchanged(run: Callable[..., Any]) -> None:
    clipped = run(ts.clip_by_global_norm)(structure(), 100.0)

    assert_same(leaves(clipped), leaves(structure()), rtol=0, atol=0)


def test_clipping_leaves_zeros_zeros(run: Callable[..., Any]) -> None:
    (clipped,) = run(ts.clip_by_global_norm)([np.zeros(3, "float32")], 1.0)

    np.testing.assert_array_equal(host(clipped), np.zeros(3))


def test_the_norm_of_float16_does_not_overflow(run: Callable[..., Any]) -> None:
    """300^2 is beyond float16, whose largest number is 65504."""
    gradients = [np.full((4,), 300.0, "float16")]

    norm = run(ts.global_norm)(gradients)
    (clipped,) = run(ts.clip_by_global_norm)(gradients, 1.0)

    assert float(host(norm)) == 600.0
    assert keras.backend.standardize_dtype(clipped.dtype) == "float16"
    np.testing.assert_allclose(host(clipped), np.full(4, 0.5), rtol=1e-3)  # float16 rounds at 5e-4


def test_clipped_gradients_bound_the_step() -> None:
    model = keras.Sequential(
        [keras.Input((3,)), layers.Dense(4, activation="tanh"), layers.Dense(1)]
    )
    optimizer = keras.optimizers.SGD(1.0)
    before = values_of(model.trainable_variables)

    @ts.function
    def step(x: Any) -> Any:
        gradients = ts.grad(lambda: 100.0 * ops.mean(model(x)), model.trainable_variables)()
        optimizer.apply(ts.clip_by_global_norm(gradients, 0.1), model.trainable_variables)

    step(normal(4, 3))

    moved = [b - a for a, b in zip(before, values_of(model.trainable_variables), strict=True)]
    # a weight of size 1 holds a step of 0.1 to 6e-7 of it
    np.testing.assert_allclose(numpy_norm(moved), 0.1, rtol=1e-5)


@pytest.mark.skipif(
    keras.backend.backend() == "torch",
    reason="Keras's torch optimizers update in place, outside of what torch differentiates",
)
def test_a_gradient_goes_through_an_optimizer_that_is_applied_inside() -> None:
    weight = keras.Variable([1.0, 2.0])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([weight])

    def adapted(x: Any) -> Any:
        gradients = ts.grad(lambda: ops.sum(weight.value**2 * x), [weight])()
        optimizer.apply(gradients, [weight])
        return ops.sum(weight.value * x)

    step = ts.function(lambda x: ts.value_and_grad(lambda: adapted(x), [weight])())
    value, (gradient,) = step(np.ones(2, "float32"))

    assert float(value) == pytest.approx(2.4, rel=1e-6)
    np.testing.assert_allclose(ops.convert_to_numpy(gradient), [0.8, 0.8], rtol=1e-6)
    np.testing.assert_allclose(ops.convert_to_numpy(weight.value), [0.8, 1.6], rtol=1e-6)
