"""Two equal models: one that Keras trains, and one for a `trainstep.Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from keras import layers

import trainstep as ts
from tests.helpers import assert_same, values_of

Compiling = Callable[[], dict[str, Any]]


def compiled(model: keras.Model, **arguments: Any) -> keras.Model:
    """Compiles with Keras; without XLA on TensorFlow, which draws other random numbers."""
    jit = "auto" if keras.backend.backend() == "jax" else False
    model.compile(jit_compile=jit, **arguments)
    return model


def twins(
    build: Callable[[], keras.Model],
    arguments: Compiling,
    keras_arguments: Compiling | None = None,
    **ours: Any,
) -> tuple[keras.Model, ts.Trainer]:
    """A model that Keras compiled, and a trainer of an equal one.

    `ours` goes to the trainer only; `keras_arguments` are Keras's, if they are not the same.
    """
    keras.utils.set_random_seed(5)
    theirs = compiled(build(), **(keras_arguments or arguments)())
    trainer = lone(build, arguments, **ours)
    if theirs.built:
        assert_same(trainer.model.weights, theirs.weights, rtol=0, atol=0)
    return theirs, trainer


def lone(build: Callable[[], keras.Model], arguments: Compiling, **ours: Any) -> ts.Trainer:
    """The trainer that `twins` makes, without a model for Keras."""
    keras.utils.set_random_seed(5)
    return ts.Trainer(build(), **arguments(), **ours)


def assert_logs(got: Mapping[str, Any], wanted: Mapping[str, Any], rtol: float) -> None:
    """Compares logs by name; `rtol` is also the absolute tolerance."""
    assert set(got) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=rtol, atol=rtol, err_msg=name)


def assert_twins(trainer: ts.Trainer, theirs: keras.Model, rtol: float, slots: bool = True) -> None:
    """Compares weights, statistics, seeds and iterations, and the optimizer's slots."""
    mine = trainer.model
    assert_same(mine.weights, theirs.weights, rtol, rtol)
    assert_same(seeds(mine), seeds(theirs), rtol, rtol)
    if slots:
        assert_same(mine.optimizer.variables, theirs.optimizer.variables, rtol, rtol)
    assert_same([mine.optimizer.iterations], [theirs.optimizer.iterations], 0, 0)


def seeds(model: keras.Model) -> list[Any]:
    """The states of the random layers."""
    return [v for v in model.non_trainable_variables if "seed" in v.path]


def everything(trainer: ts.Trainer) -> list[np.ndarray]:
    """The values of all that a failed call must leave alone."""
    model = trainer.model
    metrics = [v for metric in trainer.metrics for v in metric.variables]
    return values_of([*model.variables, *trainer.optimizer.variables, *metrics])


def mlp() -> keras.Model:
    """Six numbers to two."""
    x = keras.Input((6,), name="x")
    h = layers.Dense(5, activation="tanh", name="h")(x)
    return keras.Model(x, layers.Dense(2, name="out")(h))


def regression() -> dict[str, Any]:
    """What `mlp` is compiled with."""
    return {
        "optimizer": keras.optimizers.SGD(0.05, momentum=0.9),
        "loss": keras.losses.MeanSquaredError(),
        "metrics": [keras.metrics.MeanAbsoluteError(name="mae")],
    }
