"""Training under doctor is training alone: weights bit for bit, random numbers, what is printed
from inside compiled steps, and that what is deleted is gone.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import keras
import pytest

from .running import doctor, python, written
from .test_untouched import both

ENGINE = keras.backend.backend()
pytestmark = pytest.mark.slow  # two processes each, and both import an engine

PROLOGUE = """
import gc, hashlib, random, weakref
import keras
import numpy as np

keras.utils.set_random_seed(11)
x = np.random.default_rng(0).random((10, 4)).astype("float32")
y = x.sum(1, keepdims=True)


def digest(model):
    hashed = hashlib.sha256()
    for weight in model.get_weights():
        hashed.update(weight.tobytes())
    return hashed.hexdigest()[:16]


def made():
    layers = [keras.layers.Dense(6, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
    return keras.Sequential(layers)

"""

FIT = """
model = made()
model.compile("adam", "mse", metrics=["mae"])
history = model.fit(x, y, batch_size=4, epochs=2, verbose=0, validation_data=(x[:6], y[:6]))
print({k: [v.hex() for v in values] for k, values in history.history.items()})
print(digest(model), float(model.train_on_batch(x[:4], y[:4])[0]).hex())
print(model.evaluate(x, y, verbose=0), model.predict(x[:3], verbose=0).tobytes().hex())
print(digest(model), random.random(), np.random.rand())
"""

# An observer that keeps a bound method alive makes JAX find the old program by equality.
COMPILE_AGAIN = """
model = made()
for loss in ("mse", "mae", "mse", "huber"):
    model.compile(keras.optimizers.SGD(0.1), loss)
    history = model.fit(x, 10 * y, batch_size=5, epochs=1, verbose=0)
    print(loss, [v.hex() for v in history.history["loss"]], digest(model))
    print(model.evaluate(x, 10 * y, verbose=0).hex(), model.train_on_batch(x, 10 * y).hex())
"""

# A method that is compiled anew after its object changed, while the old one is gone.
COMPILED_METHOD = """
import jax


class Scaler:
    scale = 1.0

    def apply(self, x):
        return x * self.scale


scaler = Scaler()
for scale in (1.0, 2.0, 3.0):
    scaler.scale = scale
    print(float(jax.jit(scaler.apply)(1.0)))
"""

FREED = """
model = made()
model.compile("sgd", "mse", metrics=["mae"])
model.fit(x, y, batch_size=5, epochs=1, verbose=0)
model.predict(x, verbose=0)
layer, network = weakref.ref(model.layers[0]), weakref.ref(model)
kernel = weakref.ref(model.layers[0].kernel)
del model
keras.utils.clear_session()
gc.collect()
print([reference() is None for reference in (network, layer, kernel)])
"""


@pytest.mark.parametrize("text", [FIT, COMPILE_AGAIN], ids=["fit", "compile again"])
def test_weights_and_losses_are_the_same_to_the_bit(text: str, tmp_path: Path) -> None:
    both(tmp_path, PROLOGUE + text)


def test_a_model_that_is_deleted_is_gone(tmp_path: Path) -> None:
    both(tmp_path, PROLOGUE + FREED)


BARE = {
    "jax": """
import gc, random, weakref
import jax
import jax.numpy as jnp
import numpy as np


class Table:
    def __init__(self):
        self.values = np.arange(4, dtype="float32")

    def apply(self, x):
        random.random()
        return x * jnp.asarray(self.values)


table = Table()
apply = jax.jit(table.apply)
for size in (1, 2, 2):
    out = apply(np.ones((size, 4), "float32"))
lost = [weakref.ref(o) for o in (table, apply, out)]
del table, apply, out
jax.clear_caches()
gc.collect()
print([reference() is None for reference in lost], random.random() is not None)
""",
    "tensorflow": """
import gc, random, weakref
import tensorflow as tf


class Table(tf.Module):
    def __init__(self):
        super().__init__()
        self.values = tf.Variable(tf.ones((4,)))

    @tf.function
    def apply(self, x):
        random.random()
        return x * self.values


table = Table()
for size in (1, 2, 2):
    out = table.apply(tf.ones((size, 4)))
lost = [weakref.ref(o) for o in (table, table.values, out)]
del table, out
gc.collect()
print([reference() is None for reference in lost])
""",
    "torch": """
import gc, weakref
import torch


class Table(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.values = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.values


table = Table()
apply = torch.compile(table, backend="eager")
for size in (1, 2, 3):
    out = apply(torch.ones(size, 4))
lost = [weakref.ref(o) for o in (table, table.values, out)]
del table, apply, out
torch._dynamo.reset()
gc.collect()
print([reference() is None for reference in lost])
""",
}


def test_what_a_compiled_function_held_is_gone(tmp_path: Path) -> None:
    alone, _ = both(tmp_path, BARE[ENGINE])

    assert "False" not in alone.stdout


RANDOM = {
    "jax": """
import random
import jax
import numpy as np

random.seed(3)
np.random.seed(3)
noisy = jax.jit(lambda x: x + random.random() + np.random.rand())
print([noisy(np.ones(size, "float32")).tolist() for size in (1, 2, 1)])
print(random.random(), np.random.rand(), random.gauss(0, 1))
""",
    "tensorflow": """
import random
import numpy as np
import tensorflow as tf

random.seed(3)
np.random.seed(3)
tf.random.set_seed(3)


@tf.function
def noisy(x):
    return x + random.random() + np.random.rand() + tf.random.normal(())


print([noisy(tf.ones(size)).numpy().tolist() for size in (1, 2, 1)])
print(random.random(), np.random.rand(), random.gauss(0, 1), float(tf.random.normal(())))
""",
    "torch": """
import random
import numpy as np
import torch

random.seed(3)
torch.manual_seed(3)
noisy = torch.compile(lambda x: torch.nn.functional.dropout(x) + torch.rand(()), backend="aot_eager")
print([noisy(torch.ones(size)).tolist() for size in (1, 2, 1)])
print(random.random(), float(torch.rand(())))
""",
}


def test_random_numbers_are_those_of_a_plain_run(tmp_path: Path) -> None:
    both(tmp_path, RANDOM[ENGINE])


@pytest.mark.skipif(ENGINE != "jax", reason="JAX compares bound methods by equality")
def test_a_method_compiled_anew_has_the_objects_new_values(tmp_path: Path) -> None:
    alone, _ = both(tmp_path, COMPILED_METHOD)

    assert alone.stdout.split() == ["1.0", "2.0", "3.0"]


PRINTS = """
import tensorflow as tf

builtins = tf.autograph.experimental.Feature.BUILTIN_FUNCTIONS


@tf.function(experimental_autograph_options=builtins)
def told(x):
    print("traced")
    print("loss", tf.reduce_sum(x))
    for value in x:
        if value > 1:
            print("large", value)
    return x


@tf.function
def as_it_comes(x):
    print("once", x.shape)
    return x


for size in (1.0, 2.0, 3.0):
    told(as_it_comes(tf.constant([size, 0.0])))
"""


@pytest.mark.skipif(ENGINE != "tensorflow", reason="AutoGraph")
def test_a_tensor_is_printed_at_every_step_where_autograph_is_told_so(tmp_path: Path) -> None:
    """Only with this feature: a tf.function as it comes prints once, while it is traced."""
    alone, _ = both(tmp_path, PRINTS)

    assert alone.stdout.count("traced") == alone.stdout.count("once") == 1
    assert alone.stdout.count("loss") == 3
    assert alone.stdout.count("large") == 2


DIES = {
    "jax": """
import os, signal
import jax
import numpy as np


@jax.jit
def step(batch):
    return batch.sum()


for size in (4, 7):
    step(np.ones(size, "float32"))
""",
    "tensorflow": """
import os, signal
import tensorflow as tf


@tf.function
def step(batch):
    return tf.reduce_sum(batch)


for size in (4, 7):
    step(tf.ones(size))
""",
    "torch": """
import os, signal
import torch


@torch.compile(backend="eager")
def step(batch):
    return (batch + 1).sum()


for size in (4, 7):
    step(torch.ones(size))
""",
}


@pytest.mark.parametrize(
    ("end", "code"),
    [("os._exit(5)", 5), ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL)],
    ids=["exit", "kill"],
)
def test_what_was_traced_before_the_process_died_is_in_its_log(
    end: str, code: int, tmp_path: Path
) -> None:
    script, log = written(tmp_path, DIES[ENGINE] + end), tmp_path / "log.jsonl"
    done = doctor(script, options=["--log", log])
    reported = doctor("report", log)

    assert done.returncode == code
    assert reported.returncode == 0, reported.stderr
    text = reported.stdout + reported.stderr
    assert all(word in text for word in ("step", "batch", "4", "7", "script.py"))


def test_the_log_is_one_json_object_a_line(tmp_path: Path) -> None:
    script, log = written(tmp_path, DIES[ENGINE]), tmp_path / "log.jsonl"
    doctor(script, options=["--log", log])

    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(records) >= 2
    assert all(isinstance(record, dict) for record in records)


INTERRUPTED = """
import threading, os, signal, time
threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    while True:
        step(ONE)
        time.sleep(0.01)
except KeyboardInterrupt:
    print("stopped by hand")
"""


def test_a_training_loop_can_be_stopped_by_hand(tmp_path: Path) -> None:
    one = {"jax": "np.ones(4)", "tensorflow": "tf.ones(4)", "torch": "torch.ones(4)"}[ENGINE]
    both(tmp_path, DIES[ENGINE] + INTERRUPTED.replace("ONE", one))


FAILS = {
    "jax": "import jax\n\n@jax.jit\ndef step(x):\n    return x + undefined\n\nstep(1.0)\n",
    "tensorflow": (
        "import tensorflow as tf\n\n@tf.function\ndef step(x):\n    return x + undefined\n\n"
        "step(tf.ones(()))\n"
    ),
    "torch": (
        'import torch\n\n@torch.compile(backend="eager")\ndef step(x):\n'
        "    return x + undefined\n\nstep(torch.ones(()))\n"
    ),
}


def test_an_error_in_a_traced_function_reaches_the_script_as_it_is(tmp_path: Path) -> None:
    script = written(tmp_path, FAILS[ENGINE])
    alone, under = python(script), doctor(script)

    assert alone.returncode == under.returncode == 1
    assert "NameError" in alone.stderr
    trace = under.stderr[under.stderr.index("Traceback") :]
    assert "NameError" in trace
    assert "trainstep" not in trace.split("NameError")[0]
