"""Modules of torch's own inside of Keras models, against Keras's training of the same."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("modules are torch's", allow_module_level=True)

import torch

import trainstep as ts

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = X[:, :1]


def wrapped() -> tuple[keras.Model, torch.nn.Module]:
    keras.utils.set_random_seed(0)
    hidden, norm, last = torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)
    hidden.weight.requires_grad_(False)
    module = torch.nn.Sequential(hidden, norm, torch.nn.ReLU(), last)
    layers = [keras.Input((4,)), keras.layers.TorchModuleWrapper(module), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model(X, training=False)  # which builds the last layer
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model, module


def state(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy().copy() for name, value in module.state_dict().items()}


def assert_same(got: Any, expected: Any) -> None:
    assert got.keys() == expected.keys()
    for name in got:  # the same operations; inductor sums in another order
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("optimize", ["trace", "full"])
def test_a_module_trains_as_under_keras(optimize: str) -> None:
    model, module = wrapped()
    losses = [float(model.train_on_batch(X, Y)) for _ in range(4)]
    expected = state(module)
    model, module = wrapped()
    trainer = ts.Trainer(model, optimize=optimize)
    got = [trainer.train_on_batch(X, Y)["loss"] for _ in range(4)]
    np.testing.assert_allclose(got, losses, rtol=1e-5)
    assert losses[-1] < losses[0]
    assert_same(state(module), expected)
    assert trainer.trace_count == 1


def test_gradients_by_a_module_outside_of_a_function() -> None:
    model, module = wrapped()
    variables = model.trainable_variables
    target = torch.from_numpy(Y)
    loss = lambda: torch.mean((model(X, training=True) - target) ** 2)  # noqa: E731
    value, gradients = ts.value_and_grad(loss, variables)()
    model, module = wrapped()
    plain = torch.mean((model(X, training=True) - target) ** 2)
    plain.backward()
    assert float(value) == float(plain)
    for gradient, variable in zip(gradients, model.trainable_variables, strict=True):
        np.testing.assert_array_equal(gradient.detach(), variable.value.grad)
    assert int(module[1].num_batches_tracked) == 1


def test_evaluating_a_module_changes_nothing() -> None:
    model, module = wrapped()
    trainer = ts.Trainer(model)
    trainer.train_on_batch(X, Y)
    before = state(module)
    trainer.test_on_batch(X, Y)
    outputs = trainer.predict_on_batch(X)
    np.testing.assert_allclose(outputs.detach(), model(X, training=False).detach(), rtol=1e-6)
    assert_same(state(module), before)
