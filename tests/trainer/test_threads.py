"""A `fit` in a thread that outlives the main one."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import threading
import keras, numpy as np, trainstep as ts

x = np.random.default_rng(0).normal(size=(9600, 300)).astype("float32")  # some megabytes
model = keras.Sequential([keras.Input((300,)), keras.layers.Dense(1)])
trainer = ts.Trainer(model, optimizer="sgd", loss="mse")

def fit():
    trainer.fit(x, x[:, :1], batch_size=32, progress=False)
    print("fitted")

threading.Thread(target=fit).start()
"""


def test_fit_of_large_arrays_goes_on_when_the_main_thread_has_ended() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.stdout == "fitted\n", done.stderr[-2000:]
