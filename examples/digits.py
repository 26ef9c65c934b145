"""Trains a classifier on scikit-learn's digits with `Trainer.fit`.

It shows a progress bar, validation, early stopping by a Keras callback, the accuracy on unseen
digits, and the ledger: every trace with its reason. `make demo` runs this on JAX; set KERAS_BACKEND
to tensorflow or torch to run it on another engine.
"""

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import trainstep as ts

BATCH = 32


def load() -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Returns images of 64 pixels in 0 to 1 and their digits: to train, to validate, to test."""
    images, digits = load_digits(return_X_y=True)
    x, y = (images / 16).astype("float32"), digits.astype("int32")
    x, x_rest, y, y_rest = train_test_split(x, y, test_size=0.3, random_state=0)
    x_check, x_test, y_check, y_test = train_test_split(
        x_rest, y_rest, test_size=0.5, random_state=0
    )
    return (x, y), (x_check, y_check), (x_test, y_test)


def classifier() -> keras.Model:
    """Returns a network of one hidden layer, with batch normalization and dropout."""
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1, seed=1),
            keras.layers.Dense(10),
        ],
        name="digits",
    )


def main() -> tuple[float, ts.Trainer]:
    """Returns the accuracy on the test set, and the trainer."""
    keras.utils.set_random_seed(0)
    training, validation, test = load()
    # A shorter last batch would need a second trace, and add a line to the ledger. To keep the
    # output short, the few rows that do not fill a batch are left out.
    whole = len(training[0]) // BATCH * BATCH
    x, y = training[0][:whole], training[1][:whole]

    trainer = ts.Trainer(
        classifier(),
        optimizer=keras.optimizers.Adam(2e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    print(f"training on {keras.backend.backend()}")
    history = trainer.fit(
        x,
        y,
        epochs=30,
        batch_size=BATCH,
        validation_data=validation,
        validation_batch_size=len(validation[0]),
        callbacks=[keras.callbacks.EarlyStopping(patience=4, restore_best_weights=True)],
    )
    accuracy = trainer.evaluate(*test, batch_size=len(test[0]))["accuracy"]
    print(
        f"\nstopped after {len(history.epoch)} epochs; accuracy on unseen digits {accuracy:.3f}\n"
    )
    print(trainer.ledger)
    return accuracy, trainer


if __name__ == "__main__":
    main()
