"""What a function does about Python that cannot be part of a program, and about bad numbers."""

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
    """What to do about each.

    Attributes:
        side_effects: About Python that runs while tracing and never again.
        captures: About a value that was read while tracing and has changed since.
        nan_policy: About a loss or gradients that are not finite; None: nothing. A step that takes
            no gradients by `value_and_grad` is judged by the new values that it writes. With a
            `LossScaleOptimizer`, which sees to gradients itself, only the loss counts.
    """

    side_effects: str = "warn"
    captures: str = "retrace"
    nan_policy: str | None = None


def policies(function: str, side_effects: str, captures: str, nan_policy: str | None) -> Policies:
    """The policies, if each is one that there is."""
    chosen = Policies(side_effects, captures, nan_policy)
    for name, choices in _CHOICES.items():
        check_choice(function, name, getattr(chosen, name), choices)
    return chosen


def check_choice(function: str, name: str, came: object, choices: Sequence[object]) -> None:
    """Refuses an argument that is none of the choices there are."""
    if came not in choices:
        expected = " or ".join(map(repr, choices))
        raise ArgumentError(function, name, expected, repr(came), "pass one of them")
