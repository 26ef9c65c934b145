"""A trainer's step inside a `trainstep.function`, next to others, or inside a `tf.function`.

Tolerance: one program instead of two fuses differently, by a few float32 roundings.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import trainstep as ts
from tests.helpers import assert_same, normal, values_of
from tests.twins import assert_logs, assert_twins, lone, mlp, regression

EXACT = 3e-6
X, Y = normal(8, 6, seed=1), normal(8, 2, seed=2)


def batch(i: int) -> tuple[np.ndarray, np.ndarray]:
    return normal(8, 6, seed=i), normal(8, 2, seed=100 + i)


def random_layers() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(5, activation="tanh"),
            layers.Dropout(0.4, seed=7),
            layers.BatchNormalization(momentum=0.9),
            layers.Dense(2),
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("build", [mlp, random_layers])
def test_nested_equals_plain(build: Any) -> None:
    trainer, other = lone(build, regression), lone(build, regression)

    @ts.function
    def step(x: Any, y: Any) -> Any:
        logs = trainer.train_on_batch(x, y)
        assert all(not isinstance(value, float) for value in logs.values())
        return dict(logs)

    for i in range(4):
        got, wanted = step(*batch(i)), other.train_on_batch(*batch(i))
        assert all(ops.is_tensor(value) for value in got.values())
        assert_logs({name: float(value) for name, value in got.items()}, wanted, EXACT)
    assert step.trace_count == 1
    assert_twins(trainer, other.model, EXACT)


def test_nested_values_are_tensors_to_compute_with() -> None:
    trainer, other = lone(mlp, regression), lone(mlp, regression)

    @ts.function
    def step(x: Any, y: Any) -> Any:
        return 2.0 * trainer.train_on_batch(x, y)["loss"] + 1.0

    for i in range(3):
        wanted = 2.0 * other.train_on_batch(*batch(i))["loss"] + 1.0
        assert float(step(*batch(i))) == pytest.approx(wanted, rel=EXACT)


def test_two_updates_of_one_model_in_a_step() -> None:
    """The second sees the weights that the first left; values are of each batch alone."""
    trainer, other = lone(mlp, regression), lone(mlp, regression)

    @ts.function
    def step(x: Any, y: Any) -> Any:
        first = trainer.train_on_batch(x[:4], y[:4])
        second = trainer.train_on_batch(x[4:], y[4:])
        return first["loss"], first["mae"], second["loss"], second["mae"]

    for i in range(3):
        x, y = batch(i)
        a, b = other.train_on_batch(x[:4], y[:4]), other.train_on_batch(x[4:], y[4:])
        wanted = [a["loss"], a["mae"], b["loss"], b["mae"]]
        np.testing.assert_allclose([float(v) for v in step(x, y)], wanted, EXACT)
    assert_twins(trainer, other.model, EXACT)


@pytest.mark.slow
def test_nested_weights_of_samples_and_classes() -> None:
    def build() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), layers.Dense(3, activation="softmax")])

    def arguments() -> dict[str, Any]:
        loss = "sparse_categorical_crossentropy"
        return {"optimizer": "sgd", "loss": loss, "weighted_metrics": ["accuracy"]}

    trainer, other = lone(build, arguments), lone(build, arguments)
    classes = {0: 0.5, 1: 2.0, 2: 3.0}

    @ts.function
    def step(x: Any, y: Any, weight: Any) -> Any:
        first = trainer.train_on_batch(x, y, sample_weight=weight)
        second = trainer.train_on_batch(x, y, class_weight=classes)
        return {"a": dict(first), "b": dict(second)}

    labels = np.random.default_rng(3).integers(0, 3, (8,)).astype("int32")
    weight = np.abs(normal(8, seed=9))
    for i in range(2):
        x, _ = batch(i)
        got = step(x, labels, weight)
        wanted = other.train_on_batch(x, labels, sample_weight=weight)
        assert_logs({k: float(v) for k, v in got["a"].items()}, wanted, EXACT)
        wanted = other.train_on_batch(x, labels, class_weight=classes)
        assert_logs({k: float(v) for k, v in got["b"].items()}, wanted, EXACT)
    assert_twins(trainer, other.model, EXACT)


class Adversaries:
    """A generator, a critic, and the critic behind the generator, with a trainer for each update."""

    def __init__(self) -> None:
        keras.utils.set_random_seed(5)
        self.generator = keras.Sequential(
            [keras.Input((3,)), layers.Dense(4, activation="tanh"), layers.Dense(6)]
        )
        self.critic = keras.Sequential(
            [keras.Input((6,)), layers.Dense(4, activation="tanh"), layers.Dense(1)]
        )
        noise = keras.Input((3,))
        self.judged = keras.Model(noise, self.critic(self.generator(noise)))
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        sgd = keras.optimizers.SGD
        self.critics = ts.Trainer(self.critic, sgd(0.1, momentum=0.5), loss, metrics=["accuracy"])
        self.critic.trainable = False
        self.fakes = ts.Trainer(self.judged, sgd(0.1, momentum=0.5), loss)
        self.critic.trainable = True

    def update(self, real: Any, noise: Any) -> tuple[Any, Any]:
        """The critic's update, then the generator's, in which the critic is frozen."""
        fake = ops.convert_to_tensor(self.generator(noise))
        x = ops.concatenate([ops.convert_to_tensor(real), fake])
        y = ops.concatenate([ops.ones((4, 1)), ops.zeros((4, 1))])
        critic = self.critics.train_on_batch(x, y)["loss"]
        self.critic.trainable = False
        generator = self.fakes.train_on_batch(noise, ops.ones((4, 1)))["loss"]
        self.critic.trainable = True
        return critic, generator

    @property
    def state(self) -> list[np.ndarray]:
        optimizers = [*self.critics.optimizer.variables, *self.fakes.optimizer.variables]
        return values_of([*self.judged.weights, *optimizers])


def test_two_trainers_in_one_step() -> None:
    """A GAN's updates in one program are the same two updates made one after the other."""
    together, apart = Adversaries(), Adversaries()
    assert_same(together.judged.weights, apart.judged.weights, 0, 0)
    step = ts.function(together.update)
    for i in range(4):
        real, noise = normal(4, 6, seed=i), normal(4, 3, seed=50 + i)
        got, wanted = step(real, noise), apart.update(real, noise)
        np.testing.assert_allclose([float(v) for v in got], wanted, EXACT)
    assert_same(together.state, apart.state, EXACT, EXACT)
    assert step.trace_count == 1


def test_nested_test_and_predict() -> None:
    trainer = lone(mlp, regression)
    before = values_of(trainer.model.weights)

    @ts.function
    def look(x: Any, y: Any) -> Any:
        return trainer.test_on_batch(x, y)["loss"], trainer.predict_on_batch(x)

    loss, outputs = look(X, Y)
    assert float(loss) == pytest.approx(trainer.test_on_batch(X, Y)["loss"], rel=EXACT)
    assert_same([outputs], [trainer.predict_on_batch(X)], EXACT, EXACT)
    assert_same(trainer.model.weights, before, 0, 0)


def test_changes_reach_the_nested_step() -> None:
    """The rate and the limit are values to the program around the step, too."""
    trainer, other = (lone(mlp, regression, clip_norm=0.5) for _ in range(2))

    @ts.function
    def step(x: Any, y: Any) -> Any:
        return trainer.train_on_batch(x, y)["loss"]

    for i, (rate, limit) in enumerate([(0.05, 0.5), (0.2, 0.5), (0.2, 0.01)]):
        for one in (trainer, other):
            one.optimizer.learning_rate = rate
            one.clip_norm = limit
        step(*batch(i))
        other.train_on_batch(*batch(i))
    assert_twins(trainer, other.model, EXACT)
    assert step.trace_count == 1


def test_failed_step_around_changes_nothing() -> None:
    trainer = lone(mlp, regression)
    trainer.train_on_batch(X, Y)
    before = values_of([*trainer.model.variables, *trainer.optimizer.variables])

    @ts.function
    def step(x: Any, y: Any) -> Any:
        trainer.train_on_batch(x, y)
        raise RuntimeError("after the update")

    with pytest.raises(RuntimeError, match="after the update"):
        step(X, Y)
    assert_same([*trainer.model.variables, *trainer.optimizer.variables], before, 0, 0)


@pytest.mark.slow
def test_plain_tf_function(backend: str) -> None:
    """After one ordinary call, which builds all variables."""
    if backend != "tensorflow":
        pytest.skip("tf.function is TensorFlow's")
    import tensorflow as tf

    trainer, other = lone(random_layers, regression), lone(random_layers, regression)
    trainer.train_on_batch(*batch(9))
    other.train_on_batch(*batch(9))

    @tf.function
    def step(x: Any, y: Any) -> Any:
        logs = trainer.train_on_batch(x, y)
        return logs["loss"], logs["mae"]

    for i in range(3):
        got = step(*(tf.constant(a) for a in batch(i)))
        wanted = other.train_on_batch(*batch(i))
        np.testing.assert_allclose([float(v) for v in got], [wanted["loss"], wanted["mae"]], EXACT)
    assert_twins(trainer, other.model, EXACT)
    assert step.experimental_get_tracing_count() <= 2
