"""Several Keras models under doctor."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import trainstep

pytestmark = pytest.mark.skipif(
    keras.backend.backend() == "torch", reason="Keras compiles nothing there by itself"
)


def made() -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def test_a_new_model_is_said_to_be_the_cause_and_is_needed() -> None:
    x, y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")

    with trainstep.doctor() as found:
        for _ in range(3):
            made().train_on_batch(x, y)
        other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        other.compile("sgd", "mse")
        other.optimizer.build(other.trainable_variables)
        other.train_on_batch(x, y)

    events = [f.events[0] for f in found.report.functions if f.keras]
    events.sort(key=lambda event: event.trace.number)
    causes = [[cause.text for cause in event.trace.causes] for event in events]
    assert [len(each) for each in causes] == [0, 1, 1, 0]
    assert "new model, number 2 compiled at " in causes[1][0]
    assert "new model, number 3 compiled at " in causes[2][0]
    assert not found.report.findings
    assert "new model, number 3" in " ".join(str(found).split())
