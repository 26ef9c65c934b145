"""Trains a classifier on scikit-learn's digits in several processes, started by torchrun.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/torchrun_train.py [DIRECTORY]

Every process runs this script. When one of them dies, the others end too; torchrun starts all of
them again, and they continue from the newest checkpoint in the directory. A finished run does not
train again: use a new directory for each run.
"""

import hashlib
import sys
from typing import NamedTuple

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import trainstep as ts

BATCH = 32  # of all processes together


class Outcome(NamedTuple):
    """The result of a run."""

    accuracy: float
    state: str  # a hash of weights and slots; equal runs have equal hashes


def train(directory: str) -> Outcome:
    """Trains in one process, after `ts.initialize`; also works without other processes."""
    keras.utils.set_random_seed(0)
    images, digits = load_digits(return_X_y=True)
    x, y = (images / 16).astype("float32"), digits.astype("int32")
    x, x_test, y, y_test = train_test_split(x, y, train_size=BATCH * 45, random_state=0)

    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1, seed=1),
            keras.layers.Dense(10),
        ]
    )
    trainer = ts.Trainer(
        model,
        optimizer=keras.optimizers.Adam(2e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        strategy=ts.Mirrored(),
    )
    saved = ts.Checkpoints(directory, every=20)
    trainer.fit(x, y, epochs=8, batch_size=BATCH, checkpoints=saved, progress="lines")
    accuracy = trainer.evaluate(x_test, y_test, batch_size=len(x_test))["accuracy"]

    variables = (*model.variables, *trainer.optimizer.variables)
    state = b"".join(keras.ops.convert_to_numpy(v.value).tobytes() for v in variables)
    return Outcome(float(accuracy), hashlib.sha256(state).hexdigest())


if __name__ == "__main__":
    me = ts.initialize()
    accuracy, state = train(*(sys.argv[1:] or ["checkpoints"]))
    if me.is_first:
        print(f"accuracy on unseen digits {accuracy:.3f}; state {state}")
