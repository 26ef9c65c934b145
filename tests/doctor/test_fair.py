"""What doctor does not say: correct code that looks like a fault."""

from __future__ import annotations

from pathlib import Path

import keras
import pytest

from .running import examined_here, written

ENGINE = keras.backend.backend()
LONG = pytest.mark.slow if ENGINE == "jax" else ()

JAX = {
    "values_of_the_loop": """
import jax, jax.numpy as jnp
def loss(w): return jnp.sum(w) * (1.0 if phase == "warm" else 2.0)
values = []
for phase in ("warm", "main"):  # a new function for each: the right value each time
    values.append(float(jax.jit(jax.grad(loss))(jnp.ones(2))[0]))
assert values == [1.0, 2.0]
""",
    "compiled_loss": """
import jax, jax.numpy as jnp
loss = jax.jit(lambda w: jnp.sum(w ** 2))
w = jnp.ones(3)
for _ in range(6):
    value, gradient = jax.value_and_grad(loss)(w)
""",
    "few_gradients": """
import jax, jax.numpy as jnp
for _ in range(3):
    jax.grad(lambda x: jnp.sum(x ** 2))(jnp.ones(2))
""",
}
TENSORFLOW = {
    "built_once": """
import tensorflow as tf
class Dense(tf.Module):
    built = False
    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def __call__(self, x):
        return x * 2
layer = Dense()
layer(tf.ones((3, 2)))
layer(tf.ones((4, 2)))
""",
}
BOTH = {
    "numpy_generators": """
import keras, numpy as np
class Mixed(keras.layers.Layer):
    def build(self, shape):
        self.matrix = np.random.default_rng(0).normal(size=(2, 2)).astype("float32")
        assert isinstance(np.random.RandomState(0), np.random.RandomState)
    def call(self, x):
        return keras.ops.matmul(x, self.matrix)
model = keras.Sequential([keras.Input((2,)), Mixed(), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.optimizer.build(model.trainable_variables)
model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0)
""",
    "fine_tuning": """
import keras, numpy as np
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, name="base"), keras.layers.Dense(1)])
x, y = np.ones((8, 2)), np.ones((8, 1))
for trainable in (False, True):
    model.get_layer("base").trainable = trainable
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    model.fit(x, y, batch_size=4, verbose=0)
""",
    "a_function_in_a_callback": """
import keras, numpy as np
COMPILER
class Metric(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        double(np.ones(3, "float32"))
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.optimizer.build(model.trainable_variables)
model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, epochs=2, verbose=0, callbacks=[Metric()])
""",
}
COMPILERS = {
    "jax": "import jax\ndouble = jax.jit(lambda x: x * 2)",
    "tensorflow": "import tensorflow as tf\ndouble = tf.function(lambda x: x * 2)",
}
THREADS = """
import concurrent.futures, random, time
import numpy as np
COMPILER
kept = (random.random, time.time, print, np.random.normal)
def work(n):
    return float(np.sum(double(np.ones(n, "float32"))))
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    print(sorted(pool.map(work, range(1, 7))))
assert kept == (random.random, time.time, print, np.random.normal), "something stayed in place"
"""
SCRIPTS = {"jax": JAX | BOTH, "tensorflow": TENSORFLOW | BOTH, "torch": {}}[ENGINE]


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=LONG) if each == "numpy_generators" else each for each in SCRIPTS],
)
def test_nothing_is_found(name: str, tmp_path: Path) -> None:
    text = SCRIPTS[name].replace("COMPILER", COMPILERS[ENGINE])

    _, report = examined_here(written(tmp_path, text))

    assert [(f["kind"], f["line"], f["what"]) for f in report["findings"]] == []


@pytest.mark.skipif(ENGINE == "torch", reason="nothing is replaced there")
def test_traces_in_several_threads_leave_nothing_behind(tmp_path: Path) -> None:
    script = written(tmp_path, THREADS.replace("COMPILER", COMPILERS[ENGINE]))

    _, report = examined_here(script)

    assert not report["error"]
