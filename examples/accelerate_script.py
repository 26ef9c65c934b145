"""An ordinary Keras script, accelerated by one line, with the same results.

The script runs twice from one seed: as Keras runs it, and after `ts.accelerate(model)`. The weights
and the losses agree to float rounding. `trainstep run script.py` accelerates every model of a
script without that line.
"""

import time
from dataclasses import dataclass

import keras
import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import scale

import trainstep as ts

EPOCHS, BATCH = 4, 32


@dataclass(frozen=True)
class Result:
    """The results of one run of the script."""

    weights: list[np.ndarray]
    losses: list[float]  # of the epochs, of the evaluation and of the last batch


def script(*, accelerated: bool) -> Result:
    """Trains and evaluates a model, as an ordinary script does."""
    keras.utils.set_random_seed(0)
    x, y = load_breast_cancer(return_X_y=True)
    x, y = scale(x).astype("float32"), y[:, None].astype("float32")
    model = keras.Sequential(
        [
            keras.Input((30,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1, seed=1),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(optimizer="adam", loss="binary_crossentropy", metrics=["accuracy"])
    if accelerated:
        ts.accelerate(model)  # the one line

    history = model.fit(x, y, epochs=EPOCHS, batch_size=BATCH, shuffle=False, verbose=0)
    loss, accuracy = model.evaluate(x, y, batch_size=BATCH, verbose=0)
    model.train_on_batch(x[:BATCH], y[:BATCH])
    started = time.perf_counter()  # everything is compiled by now
    for start in range(0, len(x) - BATCH, BATCH):
        last, _ = model.train_on_batch(x[start : start + BATCH], y[start : start + BATCH])
    took = 1e3 * (time.perf_counter() - started) / (len(x) // BATCH)

    name = "trainstep" if accelerated else "Keras"
    print(f"{name:<9}  loss {loss:.6f}  accuracy {accuracy:.4f}  {took:.2f} ms per train_on_batch")
    return Result(model.get_weights(), [*history.history["loss"], loss, float(last)])


def main() -> tuple[float, float]:
    """Returns the largest difference of any weight, and of any loss."""
    keras_own, ours = script(accelerated=False), script(accelerated=True)
    pairs = zip(keras_own.weights, ours.weights, strict=True)
    by_weight = max(float(np.abs(a - b).max()) for a, b in pairs)
    by_loss = float(np.abs(np.subtract(keras_own.losses, ours.losses)).max())
    print(f"largest difference: {by_weight:.1e} of weights, {by_loss:.1e} of losses")
    return by_weight, by_loss


if __name__ == "__main__":
    main()
