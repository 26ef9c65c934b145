"""A training script of many processes: `training.py DIRECTORY [STRATEGY [STEPS_PER_CALL]]`.

It is started by something that sets who each process is, saves checkpoints, writes a line for each
batch to `progress.<rank>`, and at the end a hash of its state.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from typing import Any

import keras
import numpy as np
import parts
from keras import layers

import trainstep as ts

parts.two()


class Noting(keras.callbacks.Callback):
    """Writes a line for each batch, and takes its time."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        with open(f"{directory}/progress.{me.index}", "a") as file:
            print(os.getpid(), batch, file=file)
        time.sleep(0.03)


directory, kind = sys.argv[1], (sys.argv[2:] or ["Mirrored"])[0]
me = ts.initialize(heartbeat=4.0)
keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        layers.Input((6,)),
        layers.Dense(48),
        layers.BatchNormalization(),
        layers.Dropout(0.2, seed=3),
        layers.Dense(1),
    ]
)
strategy = getattr(ts, kind)()
trainer = ts.Trainer(model, optimizer="adam", loss="mse", metrics=["mae"], strategy=strategy)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(300, 6)).astype("float32"), rng.normal(size=(300, 1)).astype("float32")
trainer.fit(
    x,
    y,
    epochs=4,
    batch_size=32,
    checkpoints=ts.Checkpoints(f"{directory}/checkpoints", every=3),
    callbacks=[Noting()],
    progress="lines",
)
state = [
    keras.ops.convert_to_numpy(v.value).tobytes()
    for v in (*model.variables, *trainer.optimizer.variables)
]
print(f"state of {me.index}:", hashlib.sha256(b"".join(state)).hexdigest(), flush=True)
