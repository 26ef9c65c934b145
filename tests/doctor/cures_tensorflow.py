"""Cures on TensorFlow: traces, and values, counted with and without them."""

from __future__ import annotations

import random
import re
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .cure import Cures, Runs
from .running import python, written

CURES = Cures()
ANY_BATCH = [tf.TensorSpec((None, 4), tf.float32)]


@CURES.add("shape", before=3, after=1)
def leave_the_size_open_in_a_signature(cured: bool) -> int:
    runs = Runs()

    @tf.function(input_signature=ANY_BATCH if cured else None)
    def mean(x: Any) -> Any:
        runs()
        return tf.reduce_mean(x)

    for size in (8, 5, 3):
        mean(tf.ones((size, 4)))
    return runs.number


@CURES.add("shape", before=4, after=2)
def let_tensorflow_relax_the_size(cured: bool) -> int:
    runs = Runs()

    @tf.function(reduce_retracing=cured)
    def mean(x: Any) -> Any:
        runs()
        return tf.reduce_mean(x)

    for size in (8, 5, 3, 2):
        mean(tf.ones((size, 4)))
    return runs.number


@CURES.add("shape", before=2, after=1)
def drop_the_remainder(cured: bool) -> int:
    runs = Runs()

    @tf.function
    def mean(x: Any) -> Any:
        runs()
        return tf.reduce_mean(x)

    for batch in tf.data.Dataset.range(10).batch(4, drop_remainder=cured):
        mean(batch)
    return runs.number


@CURES.add("dtype", before=2, after=1)
def cast_before_the_call(cured: bool) -> int:
    runs = Runs()

    @tf.function
    def total(x: Any) -> Any:
        runs()
        return tf.reduce_sum(x)

    for x in (np.ones(4, "float32"), np.ones(4, "float64")):
        assert float(total(x.astype("float32") if cured else x)) == 4.0
    return runs.number


@CURES.add("number", before=4, after=1)
def make_the_number_a_tensor(cured: bool) -> int:
    runs = Runs()

    @tf.function
    def scaled(x: Any, rate: Any) -> Any:
        runs()
        return x * rate

    for rate in (0.5, 0.25, 0.125, 1.0):
        assert float(scaled(tf.ones(()), tf.constant(rate) if cured else rate)) == rate
    return runs.number


@CURES.add("number", before=4, after=1)
def make_the_number_one_of_numpys(cured: bool) -> int:
    runs = Runs()

    @tf.function
    def scaled(x: Any, rate: Any) -> Any:
        runs()
        return x * rate

    for rate in (0.5, 0.25, 0.125, 1.0):
        assert float(scaled(tf.ones(()), np.float32(rate) if cured else rate)) == rate
    return runs.number


@CURES.add("static", before=2, after=1)
def make_the_flag_a_tensor(cured: bool) -> int:
    runs = Runs()

    @tf.function
    def signed(x: Any, negative: Any) -> Any:
        runs()
        if negative:
            x = -x
        return x

    for flag in (True, False, True):
        value = signed(tf.ones(()), tf.constant(flag) if cured else flag)
        assert float(value) == (-1.0 if flag else 1.0)
    return runs.number


@CURES.add("object", before=4, after=1)
def close_over_the_object(cured: bool) -> int:
    runs = Runs()

    class Settings:
        scale = 2.0

    settings = Settings()

    @tf.function
    def closed(x: Any) -> Any:
        runs()
        return x * settings.scale

    @tf.function
    def given(x: Any, settings: Any) -> Any:
        runs()
        return x * settings.scale

    for _ in range(4):
        assert float(closed(tf.ones(())) if cured else given(tf.ones(()), Settings())) == 2.0
    return runs.number


@CURES.add("structure", before=2, after=1)
def keep_to_tuples(cured: bool) -> int:
    runs = Runs()

    @tf.function
    def joined(parts: Any) -> Any:
        runs()
        return tf.concat(parts, 0)

    for parts in ([tf.ones(2), tf.ones(2)], (tf.ones(2), tf.ones(2))):
        joined(tuple(parts) if cured else parts)
    return runs.number


@CURES.add("structure", before=2, after=1)
def pass_a_neutral_value_instead_of_none(cured: bool) -> int:
    runs = Runs()

    @tf.function
    def loss_of(error: Any, weight: Any = None) -> Any:
        runs()
        return tf.reduce_mean(error if weight is None else error * weight)

    for weight in (None, tf.ones(3)):
        loss_of(tf.ones(3), tf.ones(3) if cured else weight)
    return runs.number


@CURES.add("function", before=4, after=1)
def create_the_function_once(cured: bool) -> int:
    runs = Runs()

    def step(x: Any) -> Any:
        runs()
        return x + 1

    once = tf.function(step)
    for _ in range(4):
        (once if cured else tf.function(step))(tf.ones(3))
    return runs.number


@CURES.add("instance", before=4, after=1)
def keep_one_object_and_set_its_variable(cured: bool) -> int:
    runs = Runs()

    class Scaler:
        def __init__(self) -> None:
            self.factor = tf.Variable(0.0)

        @tf.function
        def apply(self, x: Any) -> Any:
            runs()
            return x * self.factor

    once = Scaler()
    for turn in range(4):
        scaler = once if cured else Scaler()
        scaler.factor.assign(turn)
        assert float(scaler.apply(tf.ones(()))) == turn
    return runs.number


@CURES.add("variables", before=2, after=1)
def build_the_model_and_the_optimizer_first(cured: bool) -> int:
    runs = Runs()
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam()

    @tf.function
    def step(x: Any) -> None:
        runs()
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    if cured:
        model.build((None, 4))
        optimizer.build(model.trainable_variables)
    for _ in range(3):
        step(tf.ones((8, 4)))
    return runs.number


@CURES.add("context", before=2, after=1)
def call_under_one_scope(cured: bool) -> int:
    runs = Runs()

    @tf.function
    def double(x: Any) -> Any:
        runs()
        return 2 * x

    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    if not cured:
        double(tf.ones(3))
    for _ in range(2):
        with strategy.scope():
            double(tf.ones(3))
    return runs.number


HIDDEN = """
import tensorflow as tf

@tf.function(jit_compile=True, input_signature=[tf.TensorSpec((None, 4), tf.float32)])
def step(x):
    return tf.reduce_sum(tf.tanh(x))

for size in SIZES:
    x = tf.ones((size, 4))
    step(tf.pad(x, [[0, 8 - size], [0, 0]]) if CURED else x)
"""


def compiled_by_xla(text: str) -> int:
    """How many programs XLA is given by a script, as TensorFlow's own log has it."""
    with tempfile.TemporaryDirectory() as folder:
        log = {"TF_CPP_VMODULE": "device_compilation_profiler=1", "TF_CPP_MIN_LOG_LEVEL": "0"}
        done = python(written(Path(folder), text), **log)
    assert done.returncode == 0, done.stderr[-2000:]
    return len(re.findall(r"\] Compiled __inference_\w*step\w* \d+ times", done.stderr))


@CURES.add("hidden", before=3, after=1, slow=True)
def give_xla_equal_shapes(cured: bool) -> int:
    return compiled_by_xla(f"SIZES, CURED = (8, 6, 3), {cured}\n{HIDDEN}")


HIDDEN_KERAS = """
import keras
import numpy as np
import tensorflow as tf

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", jit_compile=True)
model.optimizer.build(model.trainable_variables)
data = tf.data.Dataset.from_tensor_slices((tf.ones((10, 4)), tf.ones((10, 1))))
model.fit(data.batch(4, drop_remainder=CURED), epochs=2, verbose=0)
"""


@CURES.add("hidden", before=2, after=1, slow=True)
def drop_the_remainder_under_jit_compile(cured: bool) -> int:
    return compiled_by_xla(f"CURED = {cured}\n{HIDDEN_KERAS}")


@CURES.add("eager", before=5, after=1)
def decorate_the_step(cured: bool) -> int:
    runs = Runs()
    weights = tf.Variable(tf.ones(3))

    def step() -> None:
        runs()
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights**2)
        weights.assign_sub(0.25 * tape.gradient(loss, weights))

    compiled = tf.function(step) if cured else step
    for _ in range(5):
        compiled()
    np.testing.assert_allclose(weights, 0.5**5 * np.ones(3), rtol=1e-6)
    return runs.number


@CURES.add("metrics", before=1, after=0)
def train_on_one_batch_before_the_trace(cured: bool) -> int:
    """Whether the metric of the last batch is something else than that batch's."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    x = tf.ones((4, 3))
    if cured:
        model.train_on_batch(x, tf.ones((4, 1)))

    @tf.function
    def step(x: Any, y: Any) -> Any:
        return model.train_on_batch(x, y, return_dict=True)

    for target in (1.0, 10.0, 100.0):
        logs = step(x, target * tf.ones((4, 1)))
    true = float(tf.reduce_mean(tf.abs(100.0 - model(x))))
    return int(abs(float(logs["mae"]) - true) > 1e-3)


@CURES.add("stale", before=2, after=0)
def pass_what_changes_as_an_argument(cured: bool) -> int:
    """How many of three results have an old value in them."""
    scale = 1.0

    @tf.function
    def scaled(x: Any, by: Any) -> Any:
        return x * (by if cured else scale)

    wrong = 0
    for value in (1.0, 2.0, 3.0):
        scale = value
        wrong += float(scaled(tf.ones(()), tf.constant(scale))) != value
    return wrong


@CURES.add("stale", before=2, after=0)
def keep_what_changes_in_a_variable(cured: bool) -> int:
    """How many of three results have an old value in them."""
    scale: Any = tf.Variable(1.0) if cured else np.ones((), "float32")

    @tf.function
    def scaled(x: Any) -> Any:
        return x * scale

    wrong = 0
    for value in (1.0, 2.0, 3.0):
        if cured:
            scale.assign(value)
        else:
            scale[...] = value
        wrong += float(scaled(tf.ones(()))) != value
    return wrong


@CURES.add("side-effects", before=3, after=0)
def draw_with_tensorflow(cured: bool) -> int:
    """How many of four draws repeat another."""

    @tf.function
    def drawn() -> Any:
        return tf.random.uniform(()) if cured else tf.constant(random.random())

    return 4 - len({float(drawn()) for _ in range(4)})


@CURES.add("side-effects", before=3, after=0)
def count_in_a_variable(cured: bool) -> int:
    """How many of four steps a counter misses."""
    seen, count = Runs(), tf.Variable(0)

    @tf.function
    def step() -> None:
        seen()
        count.assign_add(1)

    for _ in range(4):
        step()
    return 4 - (int(count) if cured else seen.number)


@CURES.add("leaks", before=4, after=0)
def return_what_is_to_be_kept(cured: bool) -> int:
    """How many of four losses cannot be read afterwards."""
    inside: list[Any] = []

    @tf.function
    def step(x: Any) -> Any:
        loss = tf.reduce_mean(x)
        inside.append(loss)
        return loss

    outside = [step(tf.ones(3)) for _ in range(4)]
    kept = outside if cured else inside
    return 4 - sum(hasattr(v, "numpy") for v in kept)
