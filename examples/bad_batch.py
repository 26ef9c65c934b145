"""Finds the batch that turns the loss into NaN, and the layer where that begins.

One sample is corrupt. `trainer.run` computes the loss and the gradient norm of a batch and changes
nothing, so a batch can be checked before the model trains on it. `trainer.inspect` reports on the
batch layer by layer, and names the first place where a number is not finite.
"""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

import trainstep as ts

BATCH, BATCHES, BAD_ROW = 32, 20, 333


class Log(layers.Layer):
    """The logarithm of an amount, which is easier to learn from; NaN for a negative amount."""

    def call(self, x: Any) -> Any:
        return ops.log(x)


def load() -> tuple[np.ndarray, np.ndarray]:
    """Returns amounts, one of them with a wrong sign, and the logarithm of their product."""
    numbers = np.random.default_rng(0)
    x = numbers.lognormal(size=(BATCH * BATCHES, 4)).astype("float32")
    y = np.log(x).sum(axis=-1, keepdims=True)
    x[BAD_ROW, 2] *= -1
    return x, y


def main() -> tuple[ts.Trainer, ts.Inspection, list[int]]:
    """Returns the trainer, the inspection, and the numbers of the batches that were left out."""
    keras.utils.set_random_seed(0)
    x, y = load()
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Rescaling(0.5, name="halve"),
            Log(name="log"),
            layers.Dense(16, activation="relu", name="hidden"),
            layers.Dense(1, name="sum"),
        ],
        name="amounts",
    )
    trainer = ts.Trainer(model, optimizer=keras.optimizers.Adam(1e-2), loss="mse")

    bad = []
    for number in range(BATCHES):
        rows = slice(number * BATCH, (number + 1) * BATCH)
        loss, norm = trainer.run(["loss", "gradient_norm"], x[rows], y[rows])
        if np.isfinite(float(norm)):
            trainer.train_on_batch(x[rows], y[rows])
            continue
        bad.append(number)
        print(f"batch {number} is left out: loss {float(loss)}, gradient norm {float(norm)}\n")
        found = trainer.inspect(x[rows], y[rows])
        print(found)

    finite = all(np.isfinite(weight).all() for weight in model.get_weights())
    print(f"loss of the last batch {float(loss):.3f}; all weights are finite: {finite}")
    return trainer, found, bad


if __name__ == "__main__":
    main()
