"""Cures for Keras, on the engine of this process.

Keras on torch compiles nothing by itself, so there is nothing to cure there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from .cure import Cures, Program, keras_traces

CURES = Cures()
ENGINE = keras.backend.backend()


def cure(kind: str, **numbers: tuple[int, int]) -> Callable[[Program], Program]:
    """Registers a program if it has numbers, before and after, on the engine of this process."""
    if ENGINE not in numbers:
        return lambda run: run
    return CURES.add(kind, *numbers[ENGINE], slow=True)


def data(rows: int = 8) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).random((rows, 4)).astype("float32")
    return x, x.sum(1, keepdims=True)


def compiled(*layers: Any, metrics: Any = None, units: int = 1) -> Any:
    """A model whose parts are all built, compiled."""
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(units)])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=metrics)
    model.optimizer.build(model.trainable_variables)
    return model


@cure("shape", jax=(2, 1))
def drop_the_remainder(cured: bool) -> int:
    import tensorflow as tf

    model = compiled()
    batches = tf.data.Dataset.from_tensor_slices(data(10)).batch(4, drop_remainder=cured)
    return keras_traces(lambda: model.fit(batches, epochs=2, verbose=0))


@cure("shape", jax=(3, 1), tensorflow=(2, 1))
def pad_what_is_predicted_to_one_size(cured: bool) -> int:
    model, (x, _) = compiled(), data()

    def run() -> None:
        for rows in (5, 6, 7):
            part = x[:rows]
            if cured:
                part = np.pad(part, [(0, 8 - rows), (0, 0)])
            assert len(model.predict(part, verbose=0)[:rows]) == rows

    return keras_traces(run)


@cure("shape", jax=(3, 2))
def choose_a_batch_size_that_divides_the_validation_data(cured: bool) -> int:
    model, (x, y) = compiled(), data()
    size = 3 if cured else 4
    settings = {"validation_data": (x[:6], y[:6]), "validation_batch_size": size, "verbose": 0}
    return keras_traces(lambda: model.fit(x, y, batch_size=4, epochs=2, **settings))


@cure("structure", jax=(2, 1), tensorflow=(2, 1))
def keep_to_train_on_batch(cured: bool) -> int:
    model, (x, y) = compiled(), data()

    def run() -> None:
        for start in (0, 4):
            if cured:
                model.train_on_batch(x[start : start + 4], y[start : start + 4])
        if not cured:
            model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        model.train_on_batch(x[:4], y[:4])

    return keras_traces(run)


@cure("compile", jax=(3, 1), tensorflow=(3, 1))
def set_the_learning_rate_instead(cured: bool) -> int:
    model, (x, y) = compiled(), data()

    def run() -> None:
        for rate in (0.1, 0.01, 0.001):
            if cured:
                model.optimizer.learning_rate = rate
            else:
                model.compile(keras.optimizers.SGD(rate), "mse")
            model.fit(x, y, batch_size=4, verbose=0)
            np.testing.assert_allclose(float(model.optimizer.learning_rate), rate, rtol=1e-6)

    return keras_traces(run)


@cure("flag", jax=(2, 1), tensorflow=(2, 1))
def freeze_before_compile(cured: bool) -> int:
    base, (x, y) = keras.layers.Dense(3), data()
    base.trainable = not cured
    model = compiled(base)

    def run() -> None:
        model.fit(x, y, batch_size=4, verbose=0)
        if not cured:
            base.trainable = False
            model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, y, batch_size=4, verbose=0)

    return keras_traces(run)


@cure("frozen", jax=(1, 0), tensorflow=(1, 0))
def compile_after_freezing(cured: bool) -> int:
    """Whether the frozen layer moves on, or the step cannot run."""
    base, (x, y) = keras.layers.Dense(3), data()
    model = compiled(base)
    model.fit(x, y, batch_size=4, verbose=0)
    base.trainable = False
    if cured:
        model.compile(keras.optimizers.SGD(0.1), "mse")
    before = base.get_weights()[0]
    try:
        model.fit(x, y, batch_size=4, verbose=0)
    except ValueError:
        return 1
    return int((base.get_weights()[0] != before).any())


@cure("variables", tensorflow=(2, 1))
def build_everything_before_fit(cured: bool) -> int:
    x, y = data()
    layers = [keras.layers.Dense(3), keras.layers.Dense(1)]
    if cured:
        layers.insert(0, keras.Input((4,)))
    model = keras.Sequential(layers)
    model.compile("adam", "mse", metrics=[keras.metrics.MeanAbsoluteError() if cured else "mae"])
    if cured:
        model.optimizer.build(model.trainable_variables)
    return keras_traces(lambda: model.fit(x, y, batch_size=4, epochs=2, verbose=0))


@cure("stale", jax=(1, 0), tensorflow=(1, 0))
def keep_what_a_callback_changes_in_a_variable(cured: bool) -> int:
    """Whether a changed temperature is missing from the loss of the next step."""

    class Tempered(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.temperature: Any = 1.0
            if cured:
                self.temperature = keras.Variable(1.0, trainable=False)

        def call(self, x: Any) -> Any:
            return x / self.temperature

    layer, (x, y) = Tempered(), data()
    model = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    first = model.train_on_batch(x, y)
    if cured:
        layer.temperature.assign(0.1)
    else:
        layer.temperature = 0.1
    return int(np.allclose(float(first), float(model.train_on_batch(x, y))))


@cure("side-effects", jax=(3, 0), tensorflow=(3, 0))
def draw_with_keras(cured: bool) -> int:
    """How many of four outputs of a noisy layer repeat another."""

    class Noise(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.seeds = keras.random.SeedGenerator(0)

        def call(self, x: Any) -> Any:
            return x + (keras.random.uniform((), seed=self.seeds) if cured else random.random())

    model, (x, _) = keras.Sequential([keras.Input((4,)), Noise()]), data()
    return 4 - len({float(model.predict_on_batch(x)[0, 0]) for _ in range(4)})
