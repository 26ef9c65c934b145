"""Steps with ten captured values, compared at each call or ignored."""

from collections.abc import Callable
from typing import Any

import trainstep as ts
from benchmarks import steps
from benchmarks.models import Case

A, B, C, D, E, F, G, H, K, L = [1.0 / n for n in range(1, 11)]


def ten_numbers(x: Any) -> Any:
    """A step that reads ten globals."""
    return x * A + B * C + D * E + F * G + H * K + L


def step(captures: str) -> Callable[..., Any]:
    """Returns the compiled step; its captured values are compared or ignored."""
    return ts.function(ten_numbers, captures=captures)


def trace_seconds(case: Case, *, watched: bool) -> float:
    """Returns the seconds of tracing a training step, with or without finding captured values."""
    policies = {} if watched else {"captures": "ignore", "side_effects": "allow"}
    trainer = steps.trainer(case, **policies)
    trainer.train_on_batch(*case.batch())
    return trainer.ledger[0].trace_seconds
