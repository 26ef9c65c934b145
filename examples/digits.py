"""Trains a classifier on scikit-learn's digits with a step of one's own, and shows the ledger.

`make demo` runs this on JAX; set KERAS_BACKEND to tensorflow or torch for the same on another
engine. The text is the same on all three.
"""

import keras
import numpy as np
from rich.progress import track
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import trainstep as ts

EPOCHS, BATCH = 20, 32


def main() -> None:
    """Trains for a few epochs, with the last, shorter batch of each epoch left in."""
    keras.utils.set_random_seed(0)
    images, digits = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(
        (images / 16).astype("float32"), digits, test_size=0.25, random_state=0
    )

    model = keras.Sequential(
        [
            keras.layers.Dense(64, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2, seed=1),
            keras.layers.Dense(10),
        ]
    )
    optimizer = keras.optimizers.Adam(2e-3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    average = keras.metrics.Mean()

    @ts.function
    def train(x, y):
        def loss_of():
            logits = model(x, training=True)
            accuracy.update_state(y, logits)
            return loss(y, logits)

        # The model is built by its first call, so its variables are named by a function.
        value, gradients = ts.value_and_grad(loss_of, lambda: model.trainable_variables)()
        gradients = ts.clip_by_global_norm(gradients, 5.0)
        optimizer.apply(gradients, model.trainable_variables)
        average.update_state(value, sample_weight=x.shape[0])
        return value

    @ts.function
    def predict(x):
        return keras.ops.argmax(model(x, training=False), axis=-1)

    order = np.random.default_rng(0)
    for _ in track(range(EPOCHS), description=f"training on {keras.backend.backend()}"):
        accuracy.reset_state()
        average.reset_state()
        rows = order.permutation(len(x))
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            train(x[batch], y[batch])

    found = keras.ops.convert_to_numpy(predict(x_test))
    print(f"loss {float(average.result()):.4f}, training accuracy {float(accuracy.result()):.3f}")
    print(f"test accuracy {np.mean(found == y_test):.3f}\n")
    print(ts.ledger())


if __name__ == "__main__":
    main()
