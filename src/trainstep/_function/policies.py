"""Policies for side effects, captured values and values that are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainstep._common.errors import ArgumentError

OPTIMIZE = ("auto", "trace", "full", "measure")
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "side_effects": ("warn", "raise", "allow"),
    "captures": ("retrace", "warn", "raise", "ignore"),
    "nan_policy": (None, "raise", "skip"),
}


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies of one function.

    Attributes:
        side_effects: For Python that runs during tracing only.
        captures: For a captured value that has changed since the trace.
        nan_policy: For a loss or gradients that are not finite; None: no check. In a step without
            `value_and_grad`, the new values of variables are checked instead. With a
            `LossScaleOptimizer`, which handles gradients itself, only the loss is checked.
    """

    side_effects: str = "warn"
    captures: str = "retrace"
    nan_policy: str | None = None


def policies(function: str, side_effects: str, captures: str, nan_policy: str | None) -> Policies:
    """Returns the policies; raises an `ArgumentError` if one is unknown."""
    chosen = Policies(side_effects, captures, nan_policy)
    for name, choices in _CHOICES.items():
        check_choice(function, name, getattr(chosen, name), choices)
    return chosen


def check_choice(function: str, name: str, got: object, choices: Sequence[object]) -> None:
    """Raises an `ArgumentError` unless an argument is one of the choices."""
    if got not in choices:
        expected = " or ".join(map(repr, choices))
        raise ArgumentError(function, name, expected, repr(got), "pass one of them")
