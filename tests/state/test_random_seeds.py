"""Random numbers of `keras.random` in a step: new at each step, and the same after the same seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import trainstep as ts
from tests.helpers import host, normal
from tests.reports import quiet

X, Y = normal(8, 6, seed=1), normal(8, 2, seed=2)
FLAT = np.linspace(1.0, 2.0, 64, dtype="float32")

DRAWS: dict[str, Callable[[Any], Any]] = {
    "normal": lambda x: x * 0 + keras.random.normal((64,)),
    "uniform": lambda x: x * 0 + keras.random.uniform((64,), 1.0, 3.0),
    "truncated normal": lambda x: x * 0 + keras.random.truncated_normal((64,)),
    "randint": lambda x: x * 0 + ops.cast(keras.random.randint((64,), 0, 1000), "float32"),
    "dropout": lambda x: keras.random.dropout(x, 0.5),
    "shuffle": lambda x: keras.random.shuffle(x),
    "categorical": lambda x: (
        x[:16] * 0
        + ops.cast(ops.reshape(keras.random.categorical(ops.zeros((2, 50)), 8), (16,)), "float32")
    ),
    "explicit none": lambda x: x * 0 + keras.random.normal((64,), seed=None),
}


def taken(step: Any, n: int, x: Any = FLAT) -> list[np.ndarray]:
    return [np.array(host(step(x)), copy=True) for _ in range(n)]


def all_differ(draws: list[np.ndarray]) -> bool:
    return all(
        not np.array_equal(a, b) for i, a in enumerate(draws) for b in draws[i + 1 :]
    )  # fmt: skip


def all_equal(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return len(a) == len(b) and all(np.array_equal(p, q) for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize("name", DRAWS)
def test_draws_without_a_generator_are_new_at_each_step_and_follow_the_seed(name: str) -> None:
    step = ts.function(DRAWS[name], side_effects="raise", captures="raise")

    with quiet():
        keras.utils.set_random_seed(5)
        first = taken(step, 4)
        keras.utils.set_random_seed(5)
        again = taken(step, 4)
        keras.utils.set_random_seed(6)
        other = taken(step, 4)

    assert all_differ(first + other)
    assert all_equal(first, again)
    assert step.trace_count == 1


def test_draws_have_the_distribution_that_was_asked_for() -> None:
    step = ts.function(lambda x: x * 0 + keras.random.uniform((64,), 1.0, 3.0))

    draws = np.concatenate(taken(step, 50))

    assert (draws.min() >= 1.0, draws.max() < 3.0) == (True, True)
    assert len(np.unique(draws)) > 3000
    assert draws.mean() == pytest.approx(2.0, abs=0.05)
    assert draws.std() == pytest.approx(2 / 12**0.5, abs=0.05)


def test_a_new_function_follows_the_seed_as_the_first_did() -> None:
    """As in a script that is started again."""

    def run() -> list[np.ndarray]:
        keras.utils.set_random_seed(5)
        return taken(ts.function(DRAWS["normal"]), 3)

    assert all_equal(run(), run())


def test_the_first_call_may_come_before_or_after_the_seed() -> None:
    """Tracing itself costs no draw that would shift the ones that follow."""
    step = ts.function(DRAWS["normal"])
    keras.utils.set_random_seed(5)
    fresh = taken(step, 3)
    keras.utils.set_random_seed(5)
    used = taken(step, 3)

    assert all_equal(fresh, used)


def test_two_draws_in_one_step_differ() -> None:
    step = ts.function(lambda x: (keras.random.normal((64,)) + x * 0, keras.random.normal((64,))))

    draws = [np.array(host(d), copy=True) for _ in range(3) for d in step(FLAT)]

    assert all_differ(draws)


def test_two_functions_do_not_repeat_each_others_draws() -> None:
    one, two = ts.function(DRAWS["normal"]), ts.function(lambda x: DRAWS["normal"](x) + 0)

    def both() -> list[np.ndarray]:
        keras.utils.set_random_seed(5)
        return [d for _ in range(3) for d in (taken(one, 1) + taken(two, 1))]

    draws = both()
    assert all_differ(draws)
    assert all_equal(draws, both())


def test_draws_outside_and_inside_do_not_repeat_each_other() -> None:
    step = ts.function(DRAWS["normal"])

    def both() -> list[np.ndarray]:
        keras.utils.set_random_seed(5)
        return [
            d
            for _ in range(3)
            for d in (taken(step, 1)[0], np.array(host(keras.random.normal((64,))), copy=True))
        ]

    draws = both()
    assert all_differ(draws)
    assert all_equal(draws, both())


def test_draws_in_a_function_in_a_function() -> None:
    inner = ts.function(DRAWS["normal"])
    outer = ts.function(lambda x: ops.stack([inner(x), inner(x)]))

    keras.utils.set_random_seed(5)
    first = taken(outer, 3)
    keras.utils.set_random_seed(5)
    again = taken(outer, 3)

    assert all_differ([d for pair in first for d in pair])
    assert all_equal(first, again)


def test_draws_under_value_and_grad() -> None:
    v = keras.Variable(np.ones(64, "float32"))
    step = ts.function(lambda x: ts.grad(lambda: ops.sum(v * keras.random.normal((64,))), [v])()[0])

    keras.utils.set_random_seed(5)
    first = taken(step, 3)
    keras.utils.set_random_seed(5)

    assert all_differ(first)
    assert all_equal(taken(step, 3), first)


def test_other_shapes_go_on_with_the_draws() -> None:
    step = ts.function(lambda x: keras.random.uniform((64,)) + 0 * ops.sum(x), shapes="exact")

    def run() -> list[np.ndarray]:
        keras.utils.set_random_seed(5)
        return taken(step, 2) + taken(step, 2, FLAT[:5]) + taken(step, 1)

    first = run()
    assert all_differ(first)
    assert all_equal(run(), first)
    assert step.trace_count == 2


def test_a_number_as_seed_gives_the_same_draws_each_time_as_in_keras() -> None:
    step = ts.function(lambda x: x * 0 + keras.random.normal((64,), seed=42))

    draws = taken(step, 3)

    for draw in draws:
        np.testing.assert_allclose(draw, host(keras.random.normal((64,), seed=42)), rtol=1e-5)


def test_a_generator_of_its_own_is_not_moved_by_the_seed_of_all() -> None:
    generator = keras.random.SeedGenerator(3)
    step = ts.function(lambda x: x * 0 + keras.random.normal((64,), seed=generator))
    start = np.array(host(generator.state), copy=True)

    first = taken(step, 3)
    keras.utils.set_random_seed(5)
    second = taken(step, 3)
    generator.state.assign(start)

    assert all_differ(first + second)
    assert all_equal(taken(step, 6), first + second)


def test_a_failing_step_draws_nothing() -> None:
    """The state of the generator of all, too, is as it was after an error."""
    step = ts.function(DRAWS["normal"], signature=[ts.Spec((64,))])

    keras.utils.set_random_seed(5)
    wanted = taken(step, 3)
    keras.utils.set_random_seed(5)
    got = taken(step, 1)
    with pytest.raises(ts.ArgumentError):
        step(FLAT[:3])
    got += taken(step, 2)

    assert all_equal(got, wanted)


# ------------------------------------------------------------------ layers and trainers


class Noise(layers.Layer):
    """A user's layer that draws without a generator."""

    def call(self, x: Any) -> Any:
        return x + keras.random.normal((6,))

    def compute_output_shape(self, shape: Any) -> Any:
        """Spares Keras a trial call outside of any step, which it refuses to make on JAX."""
        return shape


def noisy_loss(y: Any, p: Any) -> Any:
    return ops.mean((y - p) ** 2, axis=-1) * keras.random.uniform((), 1.0, 2.0)


MAKERS: dict[str, Callable[[], ts.Trainer]] = {
    "a user's layer": lambda: ts.Trainer(network(Noise()), keras.optimizers.SGD(0.0), "mse"),
    "a dropout layer": lambda: ts.Trainer(
        network(layers.Dropout(0.5)), keras.optimizers.SGD(0.0), "mse"
    ),
    "a user's loss": lambda: ts.Trainer(network(), keras.optimizers.SGD(0.0), noisy_loss),
}


def network(*extra: Any) -> keras.Model:
    return keras.Sequential([keras.Input((6,)), *extra, layers.Dense(2)])


@pytest.mark.parametrize("what", MAKERS)
def test_a_trainer_draws_anew_at_each_step_and_follows_the_seed(what: str) -> None:
    def run() -> tuple[list[float], int]:
        keras.utils.set_random_seed(5)
        trainer = MAKERS[what]()
        with quiet():
            losses = [float(trainer.train_on_batch(X, Y)["loss"]) for _ in range(4)]
        return losses, trainer.trace_count

    first, again = run(), run()

    assert len(set(first[0])) == 4
    assert first == again
    assert first[1] == 1


@pytest.mark.slow
def test_fit_follows_the_seed() -> None:
    def run() -> list[float]:
        keras.utils.set_random_seed(5)
        trainer = ts.Trainer(network(Noise(), layers.Dropout(0.5)), "adam", noisy_loss)
        history = trainer.fit(X, Y, epochs=3, batch_size=4, steps_per_call=2, progress=False)
        return [float(v) for v in history.history["loss"]]

    first = run()
    assert run() == first
    assert len(set(first)) == 3


def test_the_steps_of_one_call_draw_different_numbers() -> None:
    """`steps_per_call` takes a loop into the program; its steps do not share their noise."""

    def run(steps: int) -> float:
        keras.utils.set_random_seed(5)
        trainer = ts.Trainer(network(), keras.optimizers.SGD(0.0), noisy_loss)
        batch = np.tile(X[:1], (8, 1)), np.tile(Y[:1], (8, 1))
        history = trainer.fit(
            *batch, batch_size=2, steps_per_call=steps, shuffle=False, progress=False
        )
        return float(history.history["loss"][0])

    def noiseless() -> float:
        keras.utils.set_random_seed(5)
        trainer = ts.Trainer(network(), keras.optimizers.SGD(0.0), "mse")
        return float(trainer.test_on_batch(X[:1], Y[:1])["loss"])

    factor = run(4) / noiseless()
    one = run(1) / noiseless()
    assert 1.0 < factor < 2.0
    assert factor == pytest.approx(one, rel=1e-4)
