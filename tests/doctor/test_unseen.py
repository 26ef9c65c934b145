"""What a script sees of its own stack is what it sees without doctor, on each engine.

Each script goes through hooks: a gradient, a trace that fails, a compiled function that fails. The
same runs tell what the first run of a program took.
"""

from __future__ import annotations

import re
from pathlib import Path

import keras
import pytest

from .running import examined, python, written

ENGINE = keras.backend.backend()
SLOW_IMPORT = pytest.mark.slow if ENGINE != "jax" else lambda test: test
GENERATED = re.compile(r"__autograph_generated_file\w+")
SHOW = """
import inspect, sys, threading, traceback

def shown(call, *args):
    try:
        call(*args)
    except Exception as error:
        print(traceback.format_exc())
        print(len(inspect.getinnerframes(error.__traceback__)))

def stack():
    traceback.print_stack(file=sys.stdout)
    print(*traceback.StackSummary.extract(traceback.walk_stack(None)).format())
    print([(frame.function, frame.lineno) for frame in inspect.stack()])

stack()
"""
SCRIPTS = {
    "jax": """
import jax, jax.numpy as jnp

def bad(w):
    stack()
    return jnp.dot(w, jnp.ones(7)).sum()

@jax.jit
def good(w):
    return w * 2

shown(jax.grad(bad), jnp.ones(3))
shown(jax.jit(bad), jnp.ones(3))
thread = threading.Thread(target=jax.jit(bad), args=(jnp.ones(3),))
thread.start()
thread.join()
good(jnp.ones(3))
jax.jit(bad)(jnp.ones(3))
""",
    "tensorflow": """
import tensorflow as tf

@tf.function(autograph=False)
def bad(x):
    stack()
    return tf.matmul(x, tf.ones((3, 3)))

@tf.function(autograph=False)
def missing(x):
    open("/there/is/no/such/file")
    return x

@tf.function
def good(x):
    return x * 2

shown(bad, tf.ones((4, 4)))
shown(missing, tf.ones(4))
shown(good, tf.ones(3), 4)
shown(tf.GradientTape().gradient, tf.ones(3), tf.ones(3))
good(tf.ones(3))
bad(tf.ones((4, 4)))
""",
    "torch": """
import torch

def failing(graph, examples):
    def run(*args):
        raise ValueError("while it runs")
    return run

@torch.compile(backend="eager", fullgraph=True)
def bad(x):
    return x @ torch.ones(7, 7)

@torch.compile(backend="eager")
def good(x):
    return x * 2

shown(bad, torch.ones(3, 3))
shown(torch.compile(lambda x: x + 1, backend=failing), torch.ones(3))
shown((torch.ones(3, requires_grad=True) * 2).backward)
good(torch.ones(3))
bad(torch.ones(3, 3))
""",
}


@pytest.mark.slow
@SLOW_IMPORT
def test_stacks_are_those_of_a_plain_run(tmp_path: Path) -> None:
    script = written(tmp_path, SHOW + SCRIPTS[ENGINE])
    alone = python(script, cwd=tmp_path)
    under, report = examined(tmp_path, script, cwd=tmp_path)

    assert alone.stdout.count("Traceback") >= 2
    assert "in stack" in alone.stdout
    assert _plain(under.stdout) == _plain(alone.stdout)
    *_, last = re.split(r"(?=^Traceback)", alone.stderr, flags=re.M)
    assert last.count('File "') > 1
    assert _plain(last) in _plain(under.stderr)
    assert under.returncode == alone.returncode == 1
    assert report["notes"] == []

    good = next(each for each in report["functions"] if each["name"] == "good")
    assert 0 < good["events"][0]["seconds"]["first_run"] < report["seconds"]


def _plain(text: str) -> str:
    return GENERATED.sub("generated", text)
