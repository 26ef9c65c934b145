"""Rewritten records of TensorFlow against the plain ones: the same numbers, where it is sure."""

from __future__ import annotations

import gc
from typing import Any

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("graphs are TensorFlow's", allow_module_level=True)

import tensorflow as tf
from keras import layers
from tensorflow.python.eager import context

import trainstep as ts
from tests.helpers import assert_same, normal, values_of
from trainstep._engines.tensorflow.tricks.rewrites import rewritten

WINDOWS = [((8, 6), 2), ((7, 9), 2), ((9, 9), 3), ((8, 6), (4, 2)), ((5, 4), (1, 2))]


def images(filling: str = "normal", size: tuple[int, int] = (7, 6)) -> np.ndarray:
    rng, shape = np.random.default_rng(0), (3, *size, 5)
    values = {
        "normal": rng.normal(size=shape),
        "ties": rng.integers(-1, 2, shape),
        "infinities": rng.choice([-np.inf, 0.0, np.inf], shape),
        "nan": np.where(rng.uniform(size=shape) < 0.1, np.nan, rng.normal(size=shape)),
    }
    return values[filling].astype("float32")


def recorded(x: np.ndarray, window: Any = 2, strides: Any = None, padding: str = "VALID") -> Any:
    """The graph of a pooling and of its gradient."""

    def both(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            largest = tf.nn.max_pool2d(2 * x, window, strides or window, padding)
            loss = tf.reduce_sum(tf.cos(largest) * tf.range(largest.shape[-1], dtype=x.dtype))
        return largest, tape.gradient(loss, x)

    specs = [tf.TensorSpec(x.shape, x.dtype)]
    return tf.function(both, autograph=False).get_concrete_function(*specs)


def compiled(function: Any, x: np.ndarray) -> list[np.ndarray]:
    by_xla = tf.function(lambda x: function(x), autograph=False, jit_compile=True)
    return [each.numpy() for each in by_xla(tf.constant(x))]


@pytest.mark.parametrize("filling", ["normal", "ties", "infinities"])
@pytest.mark.parametrize(("size", "window"), WINDOWS)
def test_pooling_gives_the_numbers_of_windows(filling: str, size: Any, window: Any) -> None:
    x = images(filling, size)
    plain = recorded(x, window)

    other = rewritten(plain)

    assert other is not plain
    for got, wanted in zip(compiled(other, x), compiled(plain, x), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_window_with_what_is_no_number_sends_its_slope_to_one_place() -> None:
    """XLA sends the same slope, but to a place that hangs on where the NaN lies."""
    x = images("nan", (8, 6))
    x[0, :2, :2] = np.nan
    plain = recorded(x)

    (largest, slopes), (wanted, by_windows) = (compiled(f, x) for f in (rewritten(plain), plain))

    np.testing.assert_array_equal(largest, wanted)
    apart = [s.reshape(3, 4, 2, 3, 2, 5) for s in (x, slopes, by_windows)]
    values, got, by_windows = (each.transpose(0, 1, 3, 5, 2, 4) for each in apart)
    fine = np.isfinite(values).all((-2, -1))
    np.testing.assert_array_equal(got[fine], by_windows[fine])
    np.testing.assert_array_equal(got[~fine].sum((-2, -1)), by_windows[~fine].sum((-2, -1)))
    assert ((got != 0).sum((-2, -1)) <= 1).all()


@pytest.mark.parametrize(
    "how", [{"strides": 1}, {"padding": "SAME"}, {"window": 3, "strides": 2}], ids=str
)
def test_windows_that_overlap_or_reach_beyond_are_left_alone(how: dict[str, Any]) -> None:
    plain = recorded(images(), **how)

    assert rewritten(plain) is plain


def trained(optimize: str, *, repeat: int = 1, **more: Any) -> ts.Trainer:
    keras.utils.set_random_seed(0)
    convolution = layers.Conv2D(4, 3, activation="relu")
    pooling = [layers.MaxPooling2D(2), layers.Flatten(), layers.Dense(1)]
    model = keras.Sequential([layers.Input((9, 9, 1)), convolution, *pooling])
    trainer = ts.Trainer(model, "sgd", "mse", optimize=optimize, **more)
    x, y = normal(50, 9, 9, 1), normal(50, 1, seed=1)
    how = {"batch_size": 8, "shuffle": False, "progress": False}
    trainer.fit(x, y, epochs=2, steps_per_call=repeat, **how)  # 6 batches of 8, and one of 2
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("repeat", [1, 3])
def test_a_convnet_trains_as_without(repeat: int) -> None:
    """ROUNDING: XLA sums in another order than the plain kernels; 2e-7 was seen."""
    plain, by_xla = trained("trace", repeat=repeat), trained("full", repeat=repeat)

    weights = [values_of(t.model.variables) for t in (by_xla, plain)]
    assert_same(*weights, rtol=0, atol=2e-6)
    assert by_xla.predict(normal(8, 9, 9, 1)).shape == (8, 1)


@pytest.mark.slow
def test_a_dropped_model_takes_the_functions_along() -> None:
    def known() -> int:
        gc.collect()
        return len(context.context().list_function_names())

    trained("full")
    before = known()

    for _ in range(3):
        trained("full")

    assert known() <= before
