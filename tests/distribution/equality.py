"""A run of one or more processes: `equality.py DIRECTORY STRATEGY`; the first saves its state."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import parts
import wide
from keras import layers

import trainstep as ts
from trainstep import _engines

parts.two()
wide.use()
directory, kind = sys.argv[1:]
me = ts.initialize(heartbeat=20.0)
keras.utils.set_random_seed(me.index)  # the weights, and the order, of the first count
model = keras.Sequential(
    [
        layers.Input((6,)),
        layers.Dense(64, use_bias=False),
        layers.BatchNormalization(),
        layers.Dense(64, activation="tanh"),
        layers.LayerNormalization(),
        layers.Dropout(0.2, seed=3),
        layers.Dense(1),
    ]
)
strategy = getattr(ts, kind)()
trainer = ts.Trainer(
    model,
    optimizer=keras.optimizers.Adam(1e-2),
    loss="mse",
    metrics=["mae"],
    strategy=strategy,
)
rng = np.random.default_rng(0)
x, y, w = rng.normal(size=(173, 6)), rng.normal(size=(173, 1)), rng.uniform(0.5, 2.0, 173)


def own_rows() -> Iterator[Any]:
    """Batches of 32, 31 and 1 rows, of which each process has its share."""
    for start, stop in ((0, 32), (32, 63), (63, 64)):
        rows = np.array_split(np.arange(start, stop), me.count)[me.index]
        yield x[rows], y[rows], w[rows]


for rows in (32, 31, 7, 1):
    trainer.train_on_batch(x[:rows], y[:rows], w[:rows])
    # On one device, torch has one for the first size, one for all others, and one for one row.
    most = 3 if me.count == 1 and keras.backend.backend() == "torch" else 2
    assert trainer._functions.step("train").program_count <= most
history = trainer.fit(x, y, sample_weight=w, epochs=1, batch_size=32, progress=False).history
assert trainer._functions.step("train").program_count <= most
trainer.fit(x, y, epochs=1, batch_size=32, steps_per_call=2, progress=False)
trainer.fit(own_rows, epochs=1, progress=False)
trainer.fit(x, y, epochs=3, batch_size=40, steps_per_epoch=2, steps_per_call=2, progress=False)
for batch in strategy.distribute((x, y, w), batch_size=100):
    trainer.train_on_batch(*batch)
for batch in strategy.distribute((x, y, w), batch_size=50, steps=2):
    trainer.train_on_batch(*batch)
logs = trainer.evaluate(x, y, batch_size=50)
predicted = np.concatenate(
    [trainer.predict(x, batch_size=50), trainer.predict(x, batch_size=50, steps=2)]
)
found = [*model.variables, *trainer.optimizer.variables]
values = [_engines.current().gather(v) for v in found]
numbers = [*history["loss"], *history["mae"], *logs.values(), *predicted.ravel()]
if me.is_first:
    np.save(f"{directory}/state.npy", np.concatenate([*map(np.ravel, values), numbers]))
