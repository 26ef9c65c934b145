"""Variables that are gone leave nothing behind in TensorFlow's runtime, programs that live go on."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

if keras.backend.backend() != "tensorflow":
    pytest.skip("TensorFlow", allow_module_level=True)

from test_memory import MB, resident

import trainstep as ts
from trainstep._engines import _tensorflow_kernels as kernels

names = (f"with_a_name_of_its_own_{index}" for index in itertools.count())


def use_and_drop(count: int) -> None:
    """A step of so many new variables, each with a new name."""
    made = [keras.Variable(np.zeros(3, "float32"), name=next(names)) for _ in range(count)]
    step = ts.function(lambda: ops.sum(ops.stack([v.value for v in made])))
    assert float(step()) == 0.0


def cleared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows whenever the runtime is told to forget its kernels."""
    calls: list[int] = []
    ours = kernels.context.context()
    forget = ours.clear_kernel_cache
    monkeypatch.setattr(ours, "clear_kernel_cache", lambda: (calls.append(1), forget()))
    return calls


def test_variables_that_are_gone_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_MOST", 100)
    for _ in range(2):
        use_and_drop(100)
    gc.collect()
    before = resident()

    for _ in range(15):
        use_and_drop(100)
        gc.collect()

    # The kernels of 1,500 variables would be 50 MB, those of the last 200 are 7.
    assert resident() - before < 25 * MB


def test_kernels_are_kept_while_few_variables_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = cleared(monkeypatch)
    use_and_drop(3)
    gc.collect()
    use_and_drop(3)

    assert not calls


def test_a_program_goes_on_when_kernels_have_been_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    total = keras.Variable(np.zeros(3, "float32"))

    @ts.function
    def step(x: Any) -> Any:
        total.assign_add(x)
        return ops.sum(total)

    step(np.ones(3, "float32"))
    use_and_drop(20)
    gc.collect()
    monkeypatch.setattr(kernels, "_MOST", 20)
    calls = cleared(monkeypatch)
    use_and_drop(1)

    assert calls
    assert float(step(np.ones(3, "float32"))) == 6.0
    assert step.trace_count == 1
