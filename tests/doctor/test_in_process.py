"""`with trainstep.doctor() as d:` in a program: the same report, for the lines inside only."""

from __future__ import annotations

import json
from pathlib import Path

import keras
import pytest

from .case import Lines
from .running import python, written

ENGINE = keras.backend.backend()

PROLOGUES = {
    "jax": """
import jax
import numpy as np

compiled = jax.jit


def ones(size):
    return np.ones(size, "float32")

""",
    "tensorflow": """
import tensorflow as tf

compiled = tf.function


def ones(size):
    return tf.ones(size)

""",
    "torch": """
import functools
import torch

compiled = functools.partial(torch.compile, backend="eager", dynamic=False)


def ones(size):
    return torch.ones(size)

""",
}

INSIDE = """
import builtins, json, random, sys, time
import trainstep


@compiled
def step(batch):
    return batch * 2


kept = (builtins.print, builtins.open, random.random, time.time, sys.meta_path[:], sys.excepthook)
step(ones(3))
with trainstep.doctor() as d:
    step(ones(3))
    step(ones(4))  # <- four
    step(ones(5))  # <- five
    step(ones(4))
step(ones(6))
left = (builtins.print, builtins.open, random.random, time.time, sys.meta_path[:], sys.excepthook)
text = str(d)
assert left == kept, "something was left behind"
print(json.dumps({"report": d.report.to_dict(), "text": text}))
"""

RAISES = """
import trainstep

try:
    with trainstep.doctor() as d:
        raise ValueError("boom")
except ValueError as error:
    print("raised", error, d.report.to_dict()["findings"])
with trainstep.doctor() as d:
    pass
print(d.report.to_dict()["functions"], bool(str(d)))
"""


def test_it_reports_what_happens_inside_and_nothing_else(tmp_path: Path) -> None:
    script = written(tmp_path, PROLOGUES[ENGINE] + INSIDE)
    done = python(script)

    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    (step,) = [f for f in told["report"]["functions"] if f["name"].split(".")[-1] == "step"]
    lines = Lines(script)
    assert step["traces"] == 2
    assert [e["line"] for e in step["events"]] == [lines.marked["four"], lines.marked["five"]]
    assert {c["kind"] for c in step["events"][-1]["causes"]} == {"shape"}
    assert "step" in told["text"]


def test_an_exception_passes_through_and_it_can_be_used_again(tmp_path: Path) -> None:
    done = python(written(tmp_path, RAISES))

    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == ["raised boom []", "[] True"]


@pytest.mark.skipif(ENGINE != "tensorflow", reason="one engine will do")
def test_a_second_one_inside_the_first_is_refused_or_works(tmp_path: Path) -> None:
    text = (
        "import trainstep\n"
        "with trainstep.doctor() as outer:\n"
        "    try:\n"
        "        with trainstep.doctor() as inner:\n"
        "            pass\n"
        "    except RuntimeError as error:\n"
        "        print('refused', error)\n"
        "print('on')\n"
    )
    done = python(written(tmp_path, text))

    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.endswith("on\n")
