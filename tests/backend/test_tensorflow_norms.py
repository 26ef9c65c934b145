"""Batch normalizations that are recorded as one operation give what Keras's own give."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

if keras.backend.backend() != "tensorflow":
    pytest.skip("TensorFlow", allow_module_level=True)

import tensorflow as tf
from twins import assert_twins, twins

import trainstep as ts
from trainstep._engines import _tensorflow_norms as norms

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


@pytest.mark.parametrize("optimize", ["trace", "full"])
@pytest.mark.parametrize("case", CASES)
def test_norms_train_as_under_keras(case: str, optimize: str, made: Made) -> None:
    parts, shape, count = CASES[case]
    theirs, trainer = pair(parts, shape, optimize=optimize)
    x, y = batch_of(shape)
    for _ in range(5):
        found = trainer.train_on_batch(x, y)
        expected = theirs.train_on_batch(x, y)
    assert len(made) == count
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


def by_hand(x: Any, *, of: Callable[[Any, Any], Any], affine: bool = False) -> Any:
    """A normalization whose statistics are also part of the value."""
    mean, variance = keras.ops.moments(x, [0])
    extra = of(mean, variance)
    scale = 1.0 + mean if affine else keras.ops.ones(x.shape[-1])
    y = keras.ops.batch_normalization(x, mean, variance, -1, scale=scale)
    return keras.ops.sum(y**3) + extra


def test_a_scale_of_another_shape(made: Made) -> None:
    x = batch_of((5,))[0]

    def value(x: Any) -> Any:
        scale = keras.ops.reshape(x[:1, :1], (1,))
        return keras.ops.batch_normalization(x, *keras.ops.moments(x, [0]), -1, scale=scale)

    np.testing.assert_allclose(ts.function(value)(x), value(tf.constant(x)), rtol=1e-5, atol=1e-6)
    assert not made


@pytest.mark.parametrize("affine", [False, True])
def test_statistics_that_the_value_depends_on_have_gradients(affine: bool, made: Made) -> None:
    x = batch_of((5,))[0]

    def value(x: Any) -> Any:
        return by_hand(
            x, of=lambda mean, variance: keras.ops.sum(mean * variance**2), affine=affine
        )

    with tf.GradientTape() as tape:
        tape.watch(given := tf.constant(x))
        expected = value(given)
    found, slopes = ts.function(ts.value_and_grad(value, argnums=0))(x)
    assert len(made) == (not affine)  # the scale would have to wait for its own result
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(slopes, tape.gradient(expected, given), rtol=1e-5, atol=1e-4)


def test_gradients_of_the_graph_itself(made: Made) -> None:
    x = batch_of((5,))[0]

    def value(x: Any) -> Any:
        return by_hand(x, of=lambda mean, variance: keras.ops.sum(mean * variance**2))

    with tf.GradientTape() as tape:
        tape.watch(given := tf.constant(x))
        expected = tape.gradient(value(given), given)
    found = ts.function(lambda x: tf.gradients(value(x), x)[0])(x)
    assert len(made) == 1
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


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

    def elsewhere() -> list[str]:
        concrete = tf.function(lambda x: by_hand(x, of=lambda *_: 0.0)).get_concrete_function(x)
        return [op.type for op in concrete.graph.get_operations()]

    @ts.function
    def step(x: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            assert "FusedBatchNormV3" not in pool.submit(elsewhere).result()
        return by_hand(x, of=lambda *_: 0.0)

    step(x)
    assert len(made) == 1
