"""Values of a `fit` that nobody reads need not be computed; nothing else changes.

Compared to the bit: what is read and what is not run the same operations, or more of them.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import trainstep as ts
from tests.helpers import host, normal

X, Y = normal(96, 6, seed=1), normal(96, 2, seed=2)


class Listening(keras.callbacks.Callback):
    """Has every batch told, and so read."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(logs["loss"])


def trainer(**how: Any) -> ts.Trainer:
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2, seed=3),
            keras.layers.Dense(2),
        ]
    )
    return ts.Trainer(model, "adam", "mse", metrics=["mae"], **how)


def state(of: ts.Trainer) -> list[np.ndarray]:
    metrics = [v for metric in of.metrics for v in metric.variables]
    return [host(v) for v in (*of.model.variables, *of.optimizer.variables, *metrics)]


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 12])  # 31 and 372 batches whose values nobody reads
def test_fit_ends_alike_whether_batches_are_read_or_not(epochs: int) -> None:
    quiet, told, listening = trainer(), trainer(), Listening()
    how: dict[str, Any] = {"epochs": epochs, "batch_size": 3, "progress": False}
    np.random.seed(0)
    one = quiet.fit(X, Y, **how).history
    np.random.seed(0)
    other = told.fit(X, Y, callbacks=[listening], **how).history
    assert one == other
    for got, wanted in zip(state(quiet), state(told), strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert len(listening.losses) == 32 * epochs
    assert quiet.trace_count == told.trace_count == 1
    # Who reads afterwards reads what there is.
    assert quiet.train_on_batch(X[:3], Y[:3])["loss"] == told.train_on_batch(X[:3], Y[:3])["loss"]
    assert quiet.trace_count == 1


def test_evaluate_ends_alike() -> None:
    one = trainer()
    found = [one.evaluate(X, Y, batch_size=3) for _ in range(12)]
    values = [dict(one.test_on_batch(X[at : at + 3], Y[at : at + 3])) for at in range(0, 96, 3)]
    # The mean of 32 batches, summed in float32 here and in float64 there.
    for name in ("loss", "mae"):
        mean = np.mean([each[name] for each in values])
        np.testing.assert_allclose([each[name] for each in found], mean, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 40, 300])
def test_a_bad_batch_that_nobody_reads_is_an_error_all_the_same(at: int) -> None:
    careful = trainer(nan_policy="raise")
    x = np.concatenate([X] * 10)
    y = np.concatenate([Y] * 10)
    x[at * 3, 0] = np.nan
    careful.train_on_batch(X[:3], Y[:3])  # the first batch is looked at for its numbers
    with pytest.raises(ts.NonFiniteError):
        careful.fit(x, y, batch_size=3, shuffle=False, progress=False)
    assert int(careful.optimizer.iterations) == 1 + at


def test_stopping_in_the_middle_tells_what_was_seen() -> None:
    one, seen = trainer(), []

    class Stopping(keras.losses.Loss):
        def call(self, y_true, y_pred):
            loss = keras.ops.mean((y_true - y_pred) ** 2)
            ts.callback(stop, loss)
            return loss

    def stop(loss: Any) -> None:
        seen.append(float(loss))
        one.model.stop_training = len(seen) == 5

    one = ts.Trainer(one.model, "sgd", Stopping())
    history = one.fit(X, Y, batch_size=4, epochs=3, shuffle=False, progress=False).history
    assert len(seen) == int(one.optimizer.iterations) == 5
    np.testing.assert_allclose(history["loss"], [np.mean(seen)], rtol=1e-6)


def test_a_model_that_tells_more_than_its_metrics_tells_it_wherever_it_stops() -> None:
    class Telling(keras.Sequential):
        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            values = super().compute_metrics(x, y, y_pred, sample_weight)
            return {**values, "extra": keras.ops.mean(y_pred)}

    model, steps = Telling([keras.Input((6,)), keras.layers.Dense(2)]), []

    def loss(y, y_pred):
        ts.callback(stop)
        return keras.ops.mean((y - y_pred) ** 2)

    def stop() -> None:
        steps.append(1)
        model.stop_training = len(steps) == 20

    history = ts.Trainer(model, "sgd", loss).fit(X, Y, batch_size=8, epochs=3, progress=False)
    assert {name: len(values) for name, values in history.history.items()} == {
        "loss": 2,
        "extra": 2,
    }


def test_data_that_looks_at_the_model_sees_every_step() -> None:
    one, seen = trainer(), []

    def batches() -> Any:
        for at in range(0, 24, 4):
            seen.append(int(one.optimizer.iterations))
            yield X[at : at + 4], Y[at : at + 4]

    one.fit(batches, progress=False)
    assert seen == list(range(6))
