"""The two steps through Keras: ours, and `train_on_batch`. Both do the work of the native ones."""

import keras
import numpy as np

import trainstep as ts
from benchmarks.models import Case
from benchmarks.settings import LEARNING_RATE, Step


def ours(case: Case, optimize: str) -> Step:
    """The step written with this library, in one of its modes."""
    model = case.model()
    loss = keras.losses.MeanSquaredError()
    metric = keras.metrics.MeanAbsoluteError()
    optimizer = keras.optimizers.Adam(LEARNING_RATE)

    @ts.function(optimize=optimize)
    def step(x: np.ndarray, y: np.ndarray) -> object:
        def loss_of() -> object:
            y_pred = model(x, training=True)
            metric.update_state(y, y_pred)
            return loss(y, y_pred)

        value, grads = ts.value_and_grad(loss_of, model.trainable_variables)()
        optimizer.apply(grads, model.trainable_variables)
        return value

    return step


def ours_by_mode(case: Case, inductor: bool = True) -> dict[str, Step]:
    """Our step in each mode that differs on this engine; torch's inductor is slow to build."""
    modes = {"jax": ["auto"], "tensorflow": ["trace", "full"], "torch": ["trace", "full"]}
    chosen = modes[keras.backend.backend()]
    if keras.backend.backend() == "torch" and not inductor:
        chosen = ["trace"]
    return {mode: ours(case, mode) for mode in chosen}


def train_on_batch(case: Case) -> Step:
    """Keras's own step, with its default settings. It reads the loss at every step by itself."""
    model = case.model()
    model.compile(
        optimizer=keras.optimizers.Adam(LEARNING_RATE),
        loss=keras.losses.MeanSquaredError(),
        metrics=[keras.metrics.MeanAbsoluteError()],
    )

    def step(x: np.ndarray, y: np.ndarray) -> object:
        loss, _ = model.train_on_batch(x, y)
        return loss

    return step
