"""A `fit` in a thread that outlives the main one."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from trainstep._data.prefetch import prefetch
from trainstep._function.sizes import background

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


@pytest.mark.slow
def test_fit_of_large_arrays_goes_on_when_the_main_thread_has_ended() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.stdout == "fitted\n", done.stderr[-2000:]


@pytest.mark.plain
def test_without_a_new_thread_rows_are_taken_in_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since Python 3.12, no thread starts once the main thread has ended."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)

    assert list(prefetch(lambda n: (n, threading.get_ident()), range(3))) == [
        (n, threading.get_ident()) for n in range(3)
    ]
    background.start(lambda: None)
    background.wait()
