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

# As IPython runs cells: each has a file that is not there, and its lines in `linecache`.
NOTEBOOK = """
import json, linecache, sys, types

PATH = "/tmp/ipykernel_4711/{}.py"
numbers = {}


class Compiler:
    def format_code_name(self, name):
        return ("Cell", f"In[{numbers[name]}]") if name in numbers else None


def run(number, cell):
    name = PATH.format(number * 1009)
    numbers[name] = number
    linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
    exec(compile(cell, name, "exec"), globals())


shell = types.SimpleNamespace(compile=Compiler())
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: shell)
run(1, "import trainstep\\n@compiled\\ndef step(batch):\\n    return batch * 2\\n")
run(2, "def train(size):\\n    # by way of another cell\\n    step(ones(size))\\n")
run(3, "with trainstep.doctor() as d:\\n    train(3)\\n    train(4)\\n")
print(json.dumps({"text": str(d), "html": d._repr_html_(), "report": d.report.to_dict()}))
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_lines_of_a_notebook_are_named_by_their_cells(tmp_path: Path) -> None:
    done = python(written(tmp_path, PROLOGUES[ENGINE] + NOTEBOOK), PYTHONWARNINGS="ignore")

    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    (finding,) = told["report"]["findings"]
    assert (finding["kind"], finding["cause"], finding["line"]) == ("retraces", "shape", 3)
    assert "at:      Cell In[2], line 3: `step(ones(size))`" in told["text"]
    assert f"({ENGINE}, Cell In[1], line " in told["text"]
    assert "# by way of another cell" in told["html"]  # the lines around it
    for shown in (told["text"], told["html"]):
        assert "ipykernel" not in shown
        assert "script.py" not in shown  # what runs the cells is nobody's


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
