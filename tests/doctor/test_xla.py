"""XLA under TensorFlow compiles without a trace: shapes and TensorFlow's log count that."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import trainstep

from .running import examined, written

if keras.backend.backend() != "tensorflow":
    pytest.skip("of TensorFlow", allow_module_level=True)

import tensorflow as tf

FOUR = tf.TensorSpec((None, 4), tf.float32)
MODELS = """
import keras
import numpy as np
import tensorflow as tf

x, y = np.ones((10, 4), "float32"), np.ones((10, 1), "float32")

def net(name, **options):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name=name)
    model.compile("sgd", "mse", jit_compile=True, **options)
    return model

def batches():
    yield from ((x[:size], y[:size]) for size in (3, 5, 7, 3))

model = net("arrays")
model.fit(x, y, batch_size=4, epochs=2, verbose=0)
model.evaluate(x, y, batch_size=4, verbose=0)
net("at_once", steps_per_execution=3).fit(x, y, batch_size=4, epochs=2, verbose=0)
signature = tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1))
net("drawn").fit(tf.data.Dataset.from_generator(batches, output_signature=signature), verbose=0)
model = net("handed")
for size in (3, 4, 5, 6, 3):
    model.train_on_batch(x[:size], y[:size])
net("equal").fit(x, y, batch_size=5, epochs=2, verbose=0)
"""


def compilations(report: dict[str, Any]) -> dict[str, int]:
    return {f["name"]: f["compilations"] for f in report["functions"] if f["compilations"]}


def counts(found: trainstep.doctor) -> dict[str, int]:
    return {f.name.split(".")[-1]: f.compilations for f in found.report.functions}


def notes(found: trainstep.doctor) -> list[str]:
    return [note.text for note in found.report.notes]


@pytest.mark.slow
def test_the_log_counts_compilations_inside_keras(tmp_path: Path) -> None:
    done, report = examined(tmp_path, written(tmp_path, MODELS), options=["--xla"])

    assert compilations(report) == {
        "train function of model 'arrays'": 1,
        "test function of model 'arrays'": 1,
        "train function of model 'at_once'": 1,
        "train function of model 'drawn'": 2,
        "train function of model 'handed'": 2,
    }
    events = [e for f in report["functions"] for e in f["events"] if e["what"] == "compile"]
    assert Counter(e["via"] for e in events) == {"fit": 4, "evaluate": 1, "train_on_batch": 2}
    assert all(e["seconds"]["compile"] > 0 for e in events)
    assert not report["notes"]
    assert "Compiled __inference" not in done.stderr


def test_shapes_count_compilations_of_a_direct_call() -> None:
    with trainstep.doctor() as found:

        @tf.function(jit_compile=True, input_signature=[FOUR])
        def step(x: Any) -> Any:
            return tf.reduce_sum(tf.tanh(x))

        for size in (8, 6, 8, 3):
            step(tf.ones((size, 4)))

    (function,) = found.report.functions
    (finding,) = found.report.findings
    assert (function.traces, function.compilations) == (1, 2)
    assert "float32[8,4] -> float32[6,4]" in finding.what
    assert all(event.trace.seconds["first_run"] > 0 for event in function.events)
    assert notes(found) == []


def test_without_the_log_the_report_names_the_function_that_is_not_counted() -> None:
    x, y = np.ones((6, 4), "float32"), np.ones((6, 1), "float32")
    with trainstep.doctor() as found:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="net")
        model.compile("sgd", "mse", jit_compile=True)
        model.fit(x, y, batch_size=4, verbose=0)

    (note,) = notes(found)
    assert "inside `train function of model 'net'` are not counted" in note
    assert "--xla" in note
    assert not any(counts(found).values())


def test_train_on_batch_is_counted_by_shapes() -> None:
    x, y = np.ones((6, 4), "float32"), np.ones((6, 1), "float32")
    with trainstep.doctor() as found:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="net")
        model.compile("sgd", "mse", jit_compile=True)
        for size in (3, 4, 5, 6, 3):
            model.train_on_batch(x[:size], y[:size])

    assert counts(found) == {"train function of model 'net'": 2}
    assert notes(found) == []


@pytest.mark.parametrize("spec", [FOUR, tf.TensorSpec((2, 4), tf.float32)], ids=["any", "one"])
def test_inside_a_plain_function_only_a_single_shape_is_certain(spec: tf.TensorSpec) -> None:
    with trainstep.doctor() as found:

        @tf.function(jit_compile=True)
        def inner(x: Any) -> Any:
            return tf.reduce_sum(tf.tanh(x))

        @tf.function(input_signature=[spec])
        def outer(x: Any) -> Any:
            return inner(x) + 1.0

        outer(tf.ones((2, 4)))

    assert ["outer` are not counted" in note for note in notes(found)] == [True] * (spec is FOUR)
    assert not any(counts(found).values())


def test_a_retrace_for_another_value_hides_no_later_compilation() -> None:
    with trainstep.doctor() as found:

        @tf.function(jit_compile=True, reduce_retracing=True)
        def step(x: Any, doubled: bool) -> Any:
            return x * 2.0 if doubled else x

        for size, doubled in ((2, False), (3, False), (3, True), (4, False), (5, False)):
            step(tf.ones((size, 4)), doubled)

    (function,) = found.report.functions
    assert (function.traces, function.compilations) == (3, 2)


def test_threads_that_compile_at_once_are_counted_once() -> None:
    with trainstep.doctor() as found:

        @tf.function(jit_compile=True, input_signature=[FOUR])
        def step(x: Any) -> Any:
            return tf.reduce_sum(tf.tanh(x))

        step(tf.ones((1, 4)))
        sizes = [tf.ones((size, 4)) for size in range(2, 8)]
        threads = [threading.Thread(target=step, args=(x,)) for x in sizes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    (function,) = found.report.functions
    assert (function.traces, function.compilations) == (1, 6)


def test_the_first_belongs_to_the_trace() -> None:
    with trainstep.doctor() as found:

        @tf.function(jit_compile=True)
        def doubled(x: Any) -> Any:
            return x * 2.0

        doubled(tf.ones(3))
        doubled(tf.ones(3))

    (function,) = found.report.functions
    (event,) = function.events
    assert event.trace.seconds["first_run"] > 0
    assert not found.report.findings
