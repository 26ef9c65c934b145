"""Batch normalizations that are recorded as one operation give what Keras's own give."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

if keras.backend.backend() != "tensorflow":
    pytest.skip("TensorFlow", allow_module_level=True)

import tensorflow as tf

import trainstep as ts
from tests.twins import assert_twins, twins
from trainstep._engines.tensorflow.tricks import fused_batch_norm as norms

# Sums of some hundred numbers in another order, five steps in a row: 1e-6 was seen. Not with Adam,
# which makes steps of rounding errors where a gradient is zero (what a normalization takes away).
CLOSE = 1e-5

Made = list[Any]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """The graph of each normalization that a test has recorded as one operation."""
    graphs: Made = []
    fused = norms._fused

    def noting(x: Any, *how: Any, **more: Any) -> Any:
        graphs.append(x.graph)
        return fused(x, *how, **more)

    monkeypatch.setattr(norms, "_fused", noting)
    return graphs


Parts = Callable[[], list[keras.layers.Layer]]


def pair(parts: Parts, shape: tuple[int, ...], **how: Any) -> tuple[keras.Model, ts.Trainer]:
    """A model for Keras and a trainer of an equal one, of normalizations and a dense layer."""

    def build() -> keras.Model:
        flat = [] if len(shape) == 1 else [layers.Flatten()]
        return keras.Sequential([layers.Input(shape), *parts(), *flat, layers.Dense(2)])

    return twins(
        build, lambda: {"optimizer": keras.optimizers.SGD(0.01, momentum=0.9), "loss": "mse"}, **how
    )


def batch_of(shape: tuple[int, ...], rows: int = 6) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    x = random.normal(2.0, 3.0, (rows, *shape)).astype(np.float32)
    return x, random.normal(size=(rows, 2)).astype(np.float32)


CASES: dict[str, tuple[Parts, tuple[int, ...], int]] = {
    "of vectors": (lambda: [layers.BatchNormalization()], (5,), 1),
    "of sequences": (lambda: [layers.BatchNormalization()], (4, 5), 1),
    "of images": (lambda: [layers.BatchNormalization(epsilon=1e-6)], (4, 4, 3), 1),
    "of volumes": (lambda: [layers.BatchNormalization()], (2, 3, 2, 4), 1),
    "last axis by number": (lambda: [layers.BatchNormalization(axis=3)], (4, 4, 3), 1),
    "without scale": (lambda: [layers.BatchNormalization(scale=False)], (4, 4, 3), 1),
    "without center": (lambda: [layers.BatchNormalization(center=False)], (5,), 1),
    "two": (
        lambda: [layers.BatchNormalization(), layers.Conv2D(3, 2), layers.BatchNormalization()],
        (4, 4, 3),
        2,
    ),
    "channels first": (lambda: [layers.BatchNormalization(axis=1)], (4, 4, 3), 0),
    "renormalized": (lambda: [layers.BatchNormalization(renorm=True)], (5,), 0),
    "of groups": (lambda: [layers.GroupNormalization(3)], (4, 4, 3), 0),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("optimize", ["trace", "full"])
@pytest.mark.parametrize("case", CASES)
def test_norms_train_as_under_keras(case: str, optimize: str, made: Made) -> None:
    parts, shape, count = CASES[case]
    theirs, trainer = pair(parts, shape, optimize=optimize)
    x, y = batch_of(shape)
    for _ in range(5):
        found = trainer.train_on_batch(x, y)
        expected = theirs.train_on_batch(x, y)
    assert len(made) == (count if optimize == "trace" else 0)
    np.testing.assert_allclose(float(found["loss"]), expected, rtol=CLOSE)
    assert_twins(trainer, theirs, CLOSE)


def test_norms_in_lower_precision(made: Made) -> None:
    theirs, trainer = pair(lambda: [layers.BatchNormalization(dtype="mixed_bfloat16")], (4, 4, 3))
    x, y = batch_of((4, 4, 3))
    trainer.train_on_batch(x, y)
    theirs.train_on_batch(x, y)
    assert len(made) == 1
    # bfloat16 has eight bits: where a sum lies between two numbers, its order decides.
    assert_twins(trainer, theirs, 1e-2)


@pytest.mark.slow
def test_norms_of_sizes_that_vary(made: Made) -> None:
    theirs, trainer = pair(lambda: [layers.BatchNormalization()], (4, 3))
    for rows in (6, 1, 9):
        x, y = batch_of((4, 3), rows)
        trainer.train_on_batch(x, y)
        theirs.train_on_batch(x, y)
    assert len(made) == 2  # one for the first size, and one for all
    assert_twins(trainer, theirs, CLOSE)


def test_a_batch_of_one_number_has_no_variance() -> None:
    norm = layers.BatchNormalization(momentum=0.0)
    norm.build((None, 3))
    step = ts.function(lambda x: norm(x, training=True))
    np.testing.assert_array_equal(step(np.full((1, 3), 7.0, np.float32)), np.zeros((1, 3)))
    np.testing.assert_array_equal(norm.moving_variance.numpy(), np.zeros(3))
    np.testing.assert_array_equal(norm.moving_mean.numpy(), np.full(3, 7.0))


def test_keras_own_statistics_are_not_computed_beside(made: Made) -> None:
    _, trainer = pair(lambda: [layers.BatchNormalization()], (4, 4, 3))
    trainer.train_on_batch(*batch_of((4, 4, 3)))
    (graph,) = made
    todo, needed = [op for op in graph.get_operations() if op.type == "AssignVariableOp"], set()
    while todo:
        op = todo.pop()
        if op not in needed:
            needed.add(op)
            todo.extend([*(x.op for x in op.inputs), *op.control_inputs])
    kinds = [op.type for op in needed]
    assert kinds.count("FusedBatchNormV3") == kinds.count("FusedBatchNormGradV3") == 1
    assert "SquaredDifference" not in kinds


@pytest.mark.parametrize("optimize", ["trace", "full", "measure"])
def test_data_far_from_zero(optimize: str) -> None:
    x = np.random.default_rng(0).normal(5000.0, 1.0, (256, 4)).astype("float32")
    norm = layers.BatchNormalization(momentum=0.0)
    norm.build(x.shape)
    step = ts.function(lambda x: norm(x, training=True), optimize=optimize)
    for _ in range(3):
        found = step(x)
    # 5000 has 12 bits before the point, and eleven behind it.
    np.testing.assert_allclose(norm.moving_variance.numpy(), x.var(0), rtol=1e-3)
    np.testing.assert_allclose(found, (x - x.mean(0)) / (x.var(0) + 1e-3) ** 0.5, atol=2e-3)


def moments(x: Any, axes: Any = (0,)) -> Any:
    return keras.ops.moments(x, axes)


def normalized(x: Any, mean: Any, variance: Any, **how: Any) -> Any:
    return keras.ops.sum(keras.ops.batch_normalization(x, mean, variance, -1, **how) ** 3)


BY_HAND: dict[str, Callable[[Any], Any]] = {
    "statistics in the value": lambda x: (
        normalized(x, *moments(x)) + keras.ops.sum(moments(x)[0] * moments(x)[1] ** 2)
    ),
    "a scale made of them": lambda x: normalized(x, *moments(x), scale=1.0 + moments(x)[0]),
    "constant statistics": lambda x: normalized(x, *map(keras.ops.stop_gradient, moments(x))),
    "one axis": lambda x: normalized(x, *moments(x, 0)),
    "all axes": lambda x: normalized(x, *moments(x, None)),
    "a number as a scale": lambda x: normalized(x, *moments(x), scale=2.0),
    "a scale of another shape": lambda x: normalized(x, *moments(x), scale=x[:1, :1]),
    "in a branch": lambda x: in_a_branch(x, *moments(x)),
    "behind a check": lambda x: behind_a_check(x, *moments(x)),
}


def in_a_branch(x: Any, mean: Any, variance: Any) -> Any:
    later = keras.ops.sum(mean * 2.0)
    return later + keras.ops.cond(
        keras.ops.sum(x) > 0, lambda: normalized(x, mean, variance), lambda: later
    )


def behind_a_check(x: Any, mean: Any, variance: Any) -> Any:
    with tf.control_dependencies([tf.debugging.assert_all_finite(mean, "")]):
        return normalized(x, mean, variance)


@pytest.mark.parametrize("name", BY_HAND)
def test_what_is_written_by_hand_stays_as_it_is(name: str, made: Made) -> None:
    x, value = batch_of((5,))[0], BY_HAND[name]

    @tf.function(autograph=False)
    def expected(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = value(x)
        return result, tape.gradient(result, x)

    result, slopes = ts.function(ts.value_and_grad(value, argnums=0))(x)
    for a, b in zip((result, slopes), expected(tf.constant(x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
    assert not made


def test_a_gradient_through_what_a_layer_measured(made: Made) -> None:
    x = batch_of((5,))[0]
    norms_of = [layers.BatchNormalization(momentum=0.5) for _ in range(2)]
    for norm in norms_of:
        norm.build(x.shape)

    def value(norm: Any, x: Any) -> Any:
        y = norm(x, training=True)
        return keras.ops.sum(y**3) + keras.ops.sum(norm.moving_mean * norm.moving_variance)

    found = ts.function(ts.grad(partial(value, norms_of[0]), argnums=0))(x)
    assert len(made) == 1
    given = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(given)
        y = norms_of[1](given, training=True)
        mean, variance = tf.nn.moments(given, [0])  # a variable would cut the gradient off
        statistics = 0.5 * mean * (0.5 + 0.5 * variance)
        expected = tf.reduce_sum(y**3) + tf.reduce_sum(statistics)
    np.testing.assert_allclose(found, tape.gradient(expected, given), rtol=1e-4, atol=1e-4)


def test_second_derivatives(made: Made) -> None:
    x = batch_of((4, 4, 3))[0]
    norm = layers.BatchNormalization()
    norm.build(x.shape)

    def slope_of(x: Any) -> Any:
        slope = ts.grad(lambda x: keras.ops.sum(norm(x, training=True) ** 3), argnums=0)(x)
        return keras.ops.sum(slope**2)

    found = ts.function(ts.grad(slope_of, argnums=0))(x)
    assert len(made) == 1
    with tf.GradientTape() as outer:
        outer.watch(given := tf.constant(x))
        with tf.GradientTape() as inner:
            inner.watch(given)
            value = keras.ops.sum(norm(given, training=True) ** 3)
        squares = keras.ops.sum(inner.gradient(value, given) ** 2)
    expected = outer.gradient(squares, given)
    scale = float(np.abs(expected).max())
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * scale)


def test_norms_in_a_branch() -> None:
    x = batch_of((5,))[0]
    norm, same = (layers.BatchNormalization() for _ in range(2))
    for each in (norm, same):
        each.build(x.shape)

    def value(x: Any) -> Any:
        return keras.ops.cond(
            keras.ops.sum(x) > 0, lambda: keras.ops.sum(norm(x, training=True) ** 3), lambda: 0.0
        )

    found = ts.function(ts.grad(value, argnums=0))(x)
    with tf.GradientTape() as tape:
        tape.watch(given := tf.constant(x))
        expected = keras.ops.sum(same(given, training=True) ** 3)
    np.testing.assert_allclose(found, tape.gradient(expected, given), rtol=1e-5, atol=1e-5)
    for a, b in zip(norm.variables, same.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-6)


def test_other_threads_are_left_alone(made: Made) -> None:
    x = batch_of((5,))[0]
    norm = layers.BatchNormalization()
    norm.build(x.shape)

    def elsewhere() -> list[str]:
        concrete = tf.function(lambda x: norm(x, training=True)).get_concrete_function(x)
        return [op.type for op in concrete.graph.get_operations()]

    @ts.function
    def step(x: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            assert "FusedBatchNormV3" not in pool.submit(elsewhere).result()
        return norm(x, training=True)

    step(x)
    assert len(made) == 1
