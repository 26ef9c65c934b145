"""The benchmarks run: what they compare exists, and takes the same first step."""

from __future__ import annotations

import importlib
import pkgutil

import keras
import pytest

import benchmarks
from benchmarks import measure, models, settings

NATIVE = [f"native_{engine}" for engine in ("jax", "tensorflow", "torch")]
NATIVE += [f"sized_{engine}" for engine in ("jax", "tensorflow", "torch")]
SHARED = [m.name for m in pkgutil.iter_modules(benchmarks.__path__) if m.name not in NATIVE]


@pytest.mark.parametrize("name", SHARED)
def test_a_benchmark_can_be_imported(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")


@pytest.mark.slow
def test_contenders_take_the_same_first_step() -> None:
    """TOLERANCE: one forward pass in float32, in another order of operations on each."""
    case = models.CASES["MLP 20-10-1"]
    x, y = case.batch()
    steps = measure.contenders_of(case, inductor=False)
    losses = {name: float(settings.read_loss(step(x, y))) for name, step in steps.items()}
    kinds = {name.partition(":")[0] for name in losses}
    assert kinds == {"native", *measure.CONTENDERS, "keras"}
    assert max(losses.values()) - min(losses.values()) < 1e-5, (keras.backend.backend(), losses)
