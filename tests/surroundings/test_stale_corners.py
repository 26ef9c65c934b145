"""Odd things around a step: watched, or left alone, never in the way."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import types
from fractions import Fraction
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import trainstep as ts

X = np.ones((2, 2), "float32")


def put(**values: Any) -> None:
    globals().update(values)


def first(result: Any) -> float:
    return float(ops.convert_to_numpy(result).ravel()[0])


class Mode(enum.Enum):
    A = 1
    B = 2


class Options:
    def __init__(self, alpha: float) -> None:
        self.alpha = alpha


VALUE: Any = None
MODE: Any = None


def steady(step: Any, *args: Any) -> float:
    """Calls a step some times, which is to cost one trace."""
    results = {first(step(*args)) for _ in range(4)}
    assert step.trace_count == 1
    assert len(results) == 1
    return results.pop()


@pytest.mark.parametrize(
    "value",
    [
        {Mode.A: [2.0], Mode.B: [3.0]},
        {int: [2.0]},
        {k: [2.0] for k in np.unique([1, 2])},
        {float("inf"): [2.0]},
        {(1, 2): [2.0]},
    ],
    ids=["enum", "class", "numpy", "inf", "tuple"],
)
def test_keys_of_any_kind_do_no_harm(value: Any) -> None:
    put(VALUE=value)
    step = ts.function(lambda x: x * next(iter(VALUE.values()))[0])

    assert steady(step, X) == 2.0
    next(iter(value.values()))[0] = 5.0
    assert first(step(X)) == 5.0


def test_a_table_of_functions_is_followed() -> None:
    put(VALUE={Mode.A: lambda x: x * 2, Mode.B: lambda x: x * 3}, MODE=Mode.A)
    step = ts.function(lambda x: VALUE[MODE](x))

    assert steady(step, X) == 2.0
    put(MODE=Mode.B)
    assert first(step(X)) == 3.0


def test_attributes_with_odd_names_are_watched() -> None:
    box = types.SimpleNamespace()
    setattr(box, "learning-rate", 2.0)
    step = ts.function(lambda x: x * getattr(box, "learning-rate"))

    assert steady(step, X) == 2.0
    setattr(box, "learning-rate", 3.0)
    assert first(step(X)) == 3.0


def test_objects_that_cannot_be_referred_to_weakly_are_watched() -> None:
    @dataclasses.dataclass(slots=True)
    class Scale:
        k: float

        def of(self, x: Any) -> Any:
            return x * self.k

    scale = Scale(2.0)
    step = ts.function(lambda x: scale.of(x))

    assert steady(step, X) == 2.0
    scale.k = 3.0
    assert first(step(X)) == 3.0


def test_static_and_class_methods_are_followed() -> None:
    class Net(layers.Layer):
        gain = 3.0

        def __init__(self) -> None:
            super().__init__()
            self.alpha = 2.0

        @staticmethod
        def scaled(x: Any, by: Any) -> Any:
            return x * by

        @classmethod
        def gained(cls, x: Any) -> Any:
            return x * cls.gain

        def call(self, x: Any) -> Any:
            return self.gained(self.scaled(x, self.alpha))

    net = Net()
    step = ts.function(lambda x: net(x))

    assert steady(step, X) == 6.0
    net.alpha = 4.0
    assert first(step(X)) == 12.0
    Net.gain = 1.0
    assert first(step(X)) == 4.0


class Awkward:
    """Raises whatever it is asked for."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __call__(self, x: Any) -> Any:
        return x


class Yes:
    """Has everything."""

    def __getattr__(self, name: str) -> Any:
        return None


def test_objects_that_raise_when_looked_at_do_no_harm() -> None:
    loop: list[Any] = [1.0]
    loop.append(loop)
    awkward, everything, alpha = [Awkward()], Yes(), 2.0

    def change(value: float) -> None:
        nonlocal alpha
        alpha = value

    @ts.function
    def step(x: Any) -> Any:
        assert everything is not None
        return awkward[0](x) * loop[0] * alpha

    assert steady(step, X) == 2.0
    change(3.0)
    assert first(step(X)) == 3.0


def test_what_nothing_reads_of_a_model_costs_no_trace() -> None:
    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.last = layers.Dense(1), 0.0

        def call(self, x: Any) -> Any:
            return self.dense(x)

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.last = float((logs or {})["loss"])

    trainer = ts.Trainer(Net(), "sgd", "mse")
    trainer.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=2, callbacks=[Note()], progress=False)

    assert trainer.trace_count == 1


def test_an_object_in_the_place_of_one_that_died_is_another() -> None:
    kept: list[Any] = []

    @ts.function(shapes="exact")
    def step(x: Any) -> Any:
        for each in kept:
            x = x * each.alpha
        return x

    for k in range(1, 12):
        kept.clear()
        kept.append(Options(float(k)))
        assert first(step(X)) == k


def test_functions_of_libraries_are_told_apart() -> None:
    put(VALUE=ops.square)
    step = ts.function(lambda x: VALUE(x))

    assert steady(step, 3 * X) == 9.0
    put(VALUE=ops.negative)
    assert first(step(3 * X)) == -3.0


class Base(layers.Layer):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def call(self, x: Any) -> Any:
        return x * self.gain


def logged(fn: Any) -> Any:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return wrapper


class Derived(Base):
    @logged
    def call(self, x: Any) -> Any:
        return super().call(x)


@contextlib.contextmanager
def scope() -> Any:
    yield VALUE


def test_inherited_decorated_and_yielding_code_is_read() -> None:
    net = Derived(2.0)
    step = ts.function(lambda x: net(x))
    assert steady(step, X) == 2.0
    net.gain = 3.0
    assert first(step(X)) == 3.0

    put(VALUE=2.0)

    @ts.function
    def inside(x: Any) -> Any:
        with scope() as value:
            return x * value

    assert steady(inside, X) == 2.0
    put(VALUE=4.0)
    assert first(inside(X)) == 4.0


def test_items_of_a_loop_and_parameters_of_inner_functions_are_followed() -> None:
    options = [Options(2.0), Options(3.0)]

    @ts.function
    def step(x: Any) -> Any:
        def scaled(by: Any) -> Any:
            return x * by.alpha

        for each in options:
            x = x * each.alpha
        return scaled(options[0])

    first_value = steady(step, X)
    options[1].alpha = 5.0
    assert first(step(X)) == first_value * 5 / 3
    options[0].alpha = 1.0
    assert first(step(X)) == 5.0


def test_a_model_of_many_layers_hides_nothing() -> None:
    x = inputs = keras.Input((2,))
    for _ in range(410):
        x = layers.Identity()(x)
    model = keras.Model(inputs, x)
    put(VALUE=2.0)

    def helper(x: Any) -> Any:
        return x * VALUE

    step = ts.function(lambda x: helper(model(x)))
    assert first(step(X)) == 2.0
    put(VALUE=3.0)
    assert first(step(X)) == 3.0


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (lambda: keras.optimizers.SGD(clipnorm=1), "clipnorm", 2),
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9), "nesterov", True),
    ],
    ids=["clipnorm", "nesterov"],
)
def test_numbers_of_an_optimizer_are_watched(make: Any, name: str, value: Any) -> None:
    optimizer = make()
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    trainer = ts.Trainer(model, optimizer, "mse")
    for _ in range(3):
        trainer.train_on_batch(X, np.ones((2, 1)))
    assert trainer.trace_count == 1
    setattr(optimizer, name, value)
    trainer.train_on_batch(X, np.ones((2, 1)))
    assert trainer.trace_count == 2
    assert name in trainer.ledger[1].reason


def test_numbers_of_a_layer_without_weights_are_watched() -> None:
    relu = layers.ReLU(max_value=6)
    step = ts.function(lambda x: relu(x))
    assert steady(step, 9 * X) == 6.0
    relu.max_value = 3
    assert first(step(9 * X)) == 3.0


def test_values_that_are_no_plain_numbers_are_compared() -> None:
    put(VALUE=Fraction(1, 2))
    step = ts.function(lambda x: x * float(VALUE))
    assert steady(step, X) == 0.5
    put(VALUE=Fraction(1, 2))
    assert first(step(X)) == 0.5
    assert step.trace_count == 1
    put(VALUE=Fraction(1, 4))
    assert first(step(X)) == 0.25


def test_long_lists_are_compared_and_very_long_ones_are_warned_of() -> None:
    put(VALUE=[1.0] * 100)
    step = ts.function(lambda x: x * sum(VALUE))
    assert steady(step, X) == 100.0
    VALUE[3] = 101.0
    assert first(step(X)) == 200.0

    put(VALUE=[1.0] * 5000)
    longer = ts.function(lambda x: x * sum(VALUE))
    with pytest.warns(ts.StaleCaptureWarning, match="5000 entries"):
        longer(X)


def test_none_is_watched_whatever_else_is_none() -> None:
    put(VALUE=None)
    box = types.SimpleNamespace(cache=None)

    @ts.function
    def step(x: Any) -> Any:
        if box.cache is not None:
            box.cache["k"] = 1
        return x if VALUE is None else x * VALUE

    assert steady(step, X) == 1.0
    put(VALUE=2.0)
    assert first(step(X)) == 2.0


def test_a_loss_that_is_a_method_is_read() -> None:
    class Task:
        gain = 1.0

        def loss(self, y: Any, p: Any) -> Any:
            return ops.mean(ops.abs(y - p * 0), axis=-1) * self.gain

    task = Task()
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    trainer = ts.Trainer(model, keras.optimizers.SGD(0.0), task.loss)
    assert trainer.train_on_batch(X, np.ones((2, 1)))["loss"] == 1.0
    task.gain = 3.0
    assert trainer.train_on_batch(X, np.ones((2, 1)))["loss"] == 3.0


def test_a_helper_of_build_may_draw(recwarn: pytest.WarningsRecorder) -> None:
    class Drawn(layers.Layer):
        def build(self, shape: Any) -> None:
            self.start = self._drawn()

        def _drawn(self) -> float:
            return float(np.random.normal())

        def call(self, x: Any) -> Any:
            return x * self.start

    layer = Drawn()
    ts.function(lambda x: layer(x))(X)
    assert not [w for w in recwarn if issubclass(w.category, ts.SideEffectWarning)]
