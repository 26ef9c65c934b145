"""The steps on Keras models: ours, that of our Trainer, and Keras's own `train_on_batch`.

All do the work of the hand-written ones. The last two also compute a running mean of the loss.
"""

from typing import Any

import keras
import numpy as np

import trainstep as ts
from benchmarks.models import Case
from benchmarks.settings import LEARNING_RATE, Step


def recipe() -> dict[str, Any]:
    """Returns optimizer, loss and metrics, as arguments of `compile` and of our Trainer."""
    return {
        "optimizer": keras.optimizers.Adam(LEARNING_RATE),
        "loss": keras.losses.MeanSquaredError(),
        "metrics": [keras.metrics.MeanAbsoluteError()],
    }


def modes(inductor: bool = True) -> list[str]:
    """Returns our modes that differ on this engine; torch's inductor compiles slowly."""
    engine = keras.backend.backend()
    if engine == "jax":
        return ["auto"]
    return ["trace", "full"] if inductor or engine != "torch" else ["trace"]


def ours(case: Case, optimize: str, *, tells_epoch: bool = False) -> Step:
    """Returns the step written with trainstep, in one of its modes.

    The step returns the loss, or the logs of an epoch: the means of the loss and of the metric.
    """
    model = case.model()
    optimizer, loss, (metric,) = recipe().values()
    mean = keras.metrics.Mean()

    @ts.function(optimize=optimize)
    def step(x: np.ndarray, y: np.ndarray) -> object:
        def loss_of() -> object:
            y_pred = model(x, training=True)
            metric.update_state(y, y_pred)
            return loss(y, y_pred)

        value, grads = ts.value_and_grad(loss_of, model.trainable_variables)()
        optimizer.apply(grads, model.trainable_variables)
        if not tells_epoch:
            return value
        mean.update_state(value, len(x))
        return {"loss": mean.result(), "error": metric.result()}

    return step


def trainer(case: Case, **how: Any) -> ts.Trainer:
    """Returns our Trainer, in one of its modes."""
    return ts.Trainer(case.model(), **recipe(), **how)


def keras_model(case: Case) -> keras.Model:
    """Returns a compiled Keras model with default settings."""
    model = case.model()
    model.compile(**recipe())
    return model


def train_on_batch(case: Case) -> Step:
    """Returns Keras's own step, which reads the loss at every step."""
    model = keras_model(case)

    def step(x: np.ndarray, y: np.ndarray) -> object:
        loss, _ = model.train_on_batch(x, y)
        return loss

    return step
