"""Strategies of one device; several are in `tests/distribution`."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import numpy as np
import pytest

import trainstep as ts
from trainstep._engines import Options
from trainstep._function.settings import StepSettings


def test_single_is_a_strategy() -> None:
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    strategy = ts.Single()
    trainer = ts.Trainer(model, optimizer="sgd", loss="mse", strategy=strategy)
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    before = trainer.train_on_batch(x, y)["loss"]
    assert trainer.train_on_batch(x, y)["loss"] < before
    assert strategy.parts == 1
    with strategy.scope():
        double = ts.function(lambda x: 2 * x)
    assert float(strategy.reduce("sum", strategy.run(double, args=(x,)), axis=0)[0]) == 8.0
    assert double.trace_count == 1


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow's devices")
def test_tensorflow_has_the_devices_that_were_made() -> None:
    assert ts.Mirrored().parts == 1
    with pytest.raises(ts.ArgumentError, match=r"`devices`[\s\S]*set_logical_device_configuration"):
        ts.Mirrored([0, 1])
    with pytest.raises(
        ts.StrategyError, match=r"every process holds whole variables[\s\S]*KERAS_BACKEND=jax"
    ):
        ts.Sharded()


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="torch has a device per process")
def test_torch_has_one_device_in_a_process() -> None:
    assert ts.Mirrored().parts == 1
    with pytest.raises(ts.StrategyError, match=r"a process has one device[\s\S]*torchrun"):
        ts.Mirrored([0, 1])
    with pytest.raises(
        ts.StrategyError, match=r"every process holds whole variables[\s\S]*KERAS_BACKEND=jax"
    ):
        ts.Sharded()


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="torch cuts its record")
def test_a_step_of_many_processes_that_calls_python_is_refused() -> None:
    many = SimpleNamespace(processes=2, parts=2)

    def step(x: object) -> object:
        ts.print(x)
        return x

    told = ts.Function(step, StepSettings(options=Options(layout=many)))
    with pytest.raises(ts.StrategyError, match=r"cannot call the host[\s\S]*to fix:"):
        told(np.ones(4, "float32"))


def test_what_a_lost_process_says() -> None:
    error = ts.ProcessLostError("connection reset")
    assert isinstance(error, ts.StrategyError)
    assert "one of them is gone" in str(error)
    assert "got:      connection reset" in str(error)
    assert "newest checkpoint" in str(error)
