"""XLA under TensorFlow compiles without a trace: counted as TensorFlow's own log counts it."""

from __future__ import annotations

import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import trainstep

from .running import SCRIPTS, examined, written

if keras.backend.backend() != "tensorflow":
    pytest.skip("of TensorFlow", allow_module_level=True)

import tensorflow as tf

from trainstep._doctor.hooks import tensorflow_xla as hooks
from trainstep._doctor.hooks.xla_counters import counters

LOG = {"TF_CPP_VMODULE": "device_compilation_profiler=1", "TF_CPP_MIN_LOG_LEVEL": "0"}
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


def test_those_inside_of_keras_are_counted_as_in_tensorflows_log(tmp_path: Path) -> None:
    done, report = examined(tmp_path, written(tmp_path, MODELS), **LOG)
    logged = re.findall(r"\] Compiled (\S+) (\d+) times", done.stderr)
    programs = len({name for name, _ in logged})

    assert compilations(report) == {
        "train function of model 'arrays'": 1,
        "test function of model 'arrays'": 1,
        "train function of model 'at_once'": 1,
        "train function of model 'drawn'": 2,
        "train function of model 'handed'": 2,
    }
    assert sum(compilations(report).values()) == len(logged) - programs
    events = [e for f in report["functions"] for e in f["events"]]
    told = Counter(e["via"] for e in events if e["what"] == "compile")
    assert told == {"fit": 4, "evaluate": 1, "train_on_batch": 2}
    assert all(e["seconds"]["compile"] > 0 for e in events if e["what"] == "compile")
    assert not report["notes"]


def test_the_log_can_be_read_instead(tmp_path: Path) -> None:
    _, report = examined(tmp_path, SCRIPTS / "tensorflow_keras_xla.py", options=["--xla"])

    assert compilations(report) == {"train function of model 'net'": 1}


def test_one_inside_of_a_plain_function_is_seen() -> None:
    with trainstep.doctor() as found:

        @tf.function(jit_compile=True, input_signature=[FOUR])
        def inner(x: Any) -> Any:
            return tf.reduce_sum(tf.tanh(x))

        @tf.function(input_signature=[FOUR])
        def outer(x: Any) -> Any:
            return inner(x) + 1.0

        for size in (2, 3, 2, 4):
            outer(tf.ones((size, 4)))
        for size in (2, 5):
            inner(tf.ones((size, 4)))

    counts = {f.name.split(".")[-1]: f.compilations for f in found.report.functions}
    assert counts["outer"] == 2


def test_one_for_another_value_is_seen() -> None:
    with trainstep.doctor() as found:

        @tf.function(jit_compile=True)
        def repeated(x: Any, times: Any) -> Any:
            return tf.tile(x, [times])

        for times in (2, 3, 2):
            repeated(tf.ones(4), tf.constant(times))

    (function,) = found.report.functions
    (finding,) = found.report.findings
    assert (function.traces, function.compilations) == (1, 1)
    assert "as before" in finding.what


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
    assert event.trace.seconds["compile"] > 0
    assert not found.report.findings


def test_without_counters_the_arguments_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(monitoring: Any) -> Any:
        raise LookupError("no such thing")

    monkeypatch.setattr(hooks, "counters", missing)
    x, y = np.ones((6, 4), "float32"), np.ones((6, 1), "float32")
    with trainstep.doctor() as found:

        @tf.function(jit_compile=True, input_signature=[FOUR])
        def step(x: Any) -> Any:
            return tf.reduce_sum(tf.tanh(x))

        for size in (8, 6, 8, 3):
            step(tf.ones((size, 4)))
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=True)
        model.fit(x, y, batch_size=4, verbose=0)

    counts = {f.name.split(".")[-1]: f.compilations for f in found.report.functions}
    notes = " ".join(note.text for note in found.report.notes)
    assert counts["step"] == 2
    assert "no such thing" in notes
    assert "--xla" in notes


def test_counters_that_lie_elsewhere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorflow.python.eager import monitoring

    from trainstep._doctor.hooks import xla_counters

    for name in ("_ROOT", "_CELL", "_LABELS"):
        with monkeypatch.context() as changed:
            changed.setattr(xla_counters, name, getattr(xla_counters, name) + 3)
            with pytest.raises((LookupError, OSError, ValueError)):
                counters(monitoring)
    number, microseconds = counters(monitoring)
    assert number.read() >= 0
    assert microseconds.read() >= 0
