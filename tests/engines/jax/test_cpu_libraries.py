"""JAX: the libraries that XLA is told to take, by what a step computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import trainstep as ts

if keras.backend.backend() != "jax":
    pytest.skip("these are XLA's", allow_module_level=True)

import jax

from trainstep._engines.jax.tricks import cpu_libraries as libraries

DEFAULT: dict[str, str] = {}
SUMS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}
PRODUCTS_AND_SUMS = {
    "xla_cpu_experimental_ynn_fusion_type": (
        "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"
    )
}


def sequential(*parts: Any) -> Any:
    return keras.Sequential([layers.Input(parts[0]), *parts[1:], layers.Dense(2)])


def wide() -> Any:
    return sequential((16,), layers.Dense(400, activation="relu"), layers.Dense(400))


def convolutional() -> Any:
    return sequential((8, 8, 3), layers.Conv2D(24, 3, activation="relu"), layers.Flatten())


def recurrent() -> Any:
    return sequential((5, 3), layers.LSTM(40))


def attentive() -> Any:
    inputs = layers.Input((6, 32))
    mixed = layers.MultiHeadAttention(2, 16)(inputs, inputs)
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(mixed)))


def both() -> Any:
    """A convolution, and products of many axes after it."""
    return sequential((6, 32), layers.Conv1D(32, 3), layers.Dense(64), layers.Flatten())


def trainer_of(make: Callable[[], Any]) -> ts.Trainer:
    keras.utils.set_random_seed(0)
    return ts.Trainer(make(), optimizer=keras.optimizers.SGD(0.1), loss="mse", shapes="exact")


def batch(trainer: ts.Trainer) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    shape = trainer.model.input_shape[1:]
    return rng.normal(size=(16, *shape)).astype("float32"), np.ones((16, 2), "float32")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What XLA is told at each compilation."""
    found: list[Any] = []
    real = jax.stages.Lowered.compile

    def compile_(self: Any, options: Any = None) -> Any:
        found.append(options or {})
        return real(self, options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (wide, SUMS),
        (convolutional, SUMS),  # its products are plain
        (recurrent, DEFAULT),
        (attentive, DEFAULT),
        (both, PRODUCTS_AND_SUMS),
    ],
)
def test_what_xla_is_told(told: list[Any], make: Any, options: dict[str, str]) -> None:
    trainer = trainer_of(make)
    trainer.train_on_batch(*batch(trainer))
    assert told == [options]


def test_large_products_are_left_to_xla() -> None:
    def product(size: int) -> dict[str, str]:
        matrix = jax.ShapeDtypeStruct((size, size), "float32")
        return libraries._options(jax.make_jaxpr(lambda a: a @ a)(matrix))

    assert product(256) == SUMS
    assert product(512) == DEFAULT


def test_a_step_without_products_is_left_to_xla() -> None:
    assert libraries._options(jax.make_jaxpr(lambda a: a + 1)(1.0)) == DEFAULT


@pytest.mark.slow
@pytest.mark.parametrize("make", [wide, convolutional, both])
def test_the_numbers_are_those_of_xla_by_itself(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    """TOLERANCE: five steps in float32, whose sums are taken in another order."""
    weights = []
    for choose in (libraries._options, lambda closed: {}):
        monkeypatch.setattr(libraries, "_options", choose)
        trainer = trainer_of(make)
        for _ in range(5):
            trainer.train_on_batch(*batch(trainer))
        weights.append(trainer.model.get_weights())
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_the_users_own_flags_count(told: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=")
    trainer = trainer_of(wide)
    trainer.train_on_batch(*batch(trainer))
    assert told == [{}]


def test_an_xla_that_does_not_know_the_option(
    told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "_OPTION", "xla_cpu_of_another_time")
    trainer = trainer_of(wide)
    trainer.train_on_batch(*batch(trainer))
    assert told == [{"xla_cpu_of_another_time": "LIBRARY_FUSION_TYPE_REDUCE"}, {}]
