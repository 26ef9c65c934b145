"""What doctor runs at a call that is not traced: on JAX and torch, nothing.

On TensorFlow, calls are counted, and on torch gradients: `make bench` measures what that takes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import keras
import numpy as np
import pytest

import trainstep

ENGINE = keras.backend.backend()
OURS = str(Path(trainstep.__file__).parent)
SCALE, MARGIN = 2.0, 0.5


def frames(call: Callable[[], Any]) -> list[str]:
    """The functions of trainstep's that a call runs."""
    found: list[str] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            found.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def of_jax() -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    weights = jnp.ones((4, 2))

    @jax.jit
    def step(weights: Any) -> Any:
        return weights - jax.grad(lambda w: jnp.sum((w * SCALE - MARGIN) ** 2))(weights)

    return lambda: step(weights)


def of_torch() -> Callable[[], Any]:
    import torch

    weights = torch.ones((4, 2), requires_grad=True)
    step = torch.compile(lambda w: ((w * SCALE - MARGIN) ** 2).sum(), backend="aot_eager")
    return lambda: step(weights)


@pytest.mark.skipif(ENGINE == "tensorflow", reason="calls are counted there")
def test_a_call_that_is_not_traced_runs_nothing_of_doctors() -> None:
    with trainstep.doctor() as found:
        call = {"jax": of_jax, "torch": of_torch}[ENGINE]()
        first = frames(call)
        call()
        later = [name for _ in range(100) for name in frames(call)]

    assert first, "the trace is not seen"
    assert found.report.functions
    assert later == []


@pytest.mark.skipif(ENGINE != "torch", reason="of torch's gradients")
def test_a_gradient_runs_one_short_function_of_doctors() -> None:
    def train(steps: int) -> None:
        for _ in range(steps):
            call().backward()

    with trainstep.doctor():
        call = of_torch()
        train(300)  # of which the 1st, 2nd, 4th, ... 256th are looked at
        run = frames(lambda: train(100))

    assert run == ["TorchGradients._counting_level.<locals>.counting_level"] * 100


@pytest.mark.skipif(ENGINE != "torch", reason="of torch's gradients")
def test_a_gradient_that_a_library_takes_does_so_too() -> None:
    library: dict[str, Any] = {"__name__": "library"}
    code = "def take(loss):\n    loss.backward()\n"
    exec(compile(code, "/usr/lib/site-packages/library.py", "exec"), library)

    def train(steps: int) -> None:
        for _ in range(steps):
            library["take"](call())

    with trainstep.doctor():
        call = of_torch()
        train(300)
        run = frames(lambda: train(100))

    assert run == ["TorchGradients._counting_level.<locals>.counting_level"] * 100


@pytest.mark.skipif(ENGINE == "torch", reason="a flag counts there whenever it is set")
def test_layers_are_looked_at_when_a_flag_was_set_and_not_at_every_call() -> None:
    x, y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")

    with trainstep.doctor():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        for _ in range(3):
            model.train_on_batch(x, y)
        unchanged = frames(lambda: model.train_on_batch(x, y))
        for flag in (False, True):
            model.layers[0].trainable = flag
        changed = frames(lambda: model.train_on_batch(x, y))
        after = frames(lambda: model.train_on_batch(x, y))

    assert "Keras._check_model" in unchanged
    assert [each.count("trainable_flags") for each in (unchanged, changed, after)] == [0, 1, 0]
