"""What happens, and what to do about it: the words for every cause of a trace or a surprise.

One place, so that the ledger, warnings and errors say the same of the same thing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from trainstep import _site


class Advice(NamedTuple):
    """What really happens, and the cure."""

    happens: str
    cure: str


# Causes of a trace, in order of cost: the first that applies is the one to talk about.
TRACES = {
    "object": (
        "an object is part of the program: pass the same one, or expect one trace for each; "
        "create models, optimizers and functions outside the loop"
    ),
    "capture": (
        "a value that the step takes from around it is part of the program: pass it as an "
        "argument, or keep it in a keras.Variable, and no trace is needed"
    ),
    "structure": "keep one structure: an optional argument that comes and goes costs a program",
    "array": (
        "a program of its own: declare axes whose size varies (`dynamic=`, or None in a `Spec`), "
        "and convert to one dtype before the call"
    ),
    "number": "pass a number of one type: an int and a float are different programs",
    "static": "a bool, string, None or enum is part of the program: one trace per value",
    "flag": "freezing is part of the program: one trace per pattern; going back reuses the first",
}


def trace_advice(kinds: Iterable[str]) -> str:
    """One line on what to do about a trace, given the kinds of what changed."""
    changed = set(kinds)
    found = (text for kind, text in TRACES.items() if kind in changed)
    return next(found, "nothing: the first trace is needed")


# Python that runs while a step is traced, by what it does.
EFFECTS = {
    "random": Advice(
        "it drew{value} once, while the step was traced; every step uses that number",
        "draw with keras.random and a keras.random.SeedGenerator, or draw outside the step and "
        "pass the numbers as an argument",
    ),
    "clock": Advice(
        "it gave{value} once, while the step was traced; every step sees that moment",
        "read the clock outside the step and pass it as an argument, or use trainstep.callback",
    ),
    "print": Advice(
        "it ran once, while the step was traced, and runs at no step",
        "trainstep.print, which runs at every step",
    ),
    "file": Advice(
        "it ran once, while the step was traced, and runs at no step",
        "do it outside the step and pass what it gives as an argument, or in a "
        "trainstep.callback, which runs at every step",
    ),
    "write": Advice(
        "it happened once, while the step was traced{value}, and happens at no step",
        "return the value from the step, or keep it in a keras.Variable",
    ),
    "argument": Advice(
        "the step works on a copy of its arguments{value}: the change is lost",
        "return the value from the step",
    ),
}


@dataclass(frozen=True, slots=True)
class Effect:
    """Something that a step did in Python while it was traced."""

    kind: str  # of `EFFECTS`
    what: str
    file: str
    line: int
    value: str = ""

    @property
    def site(self) -> str:
        """The user's line."""
        return _site.name(self.file, self.line)

    def __str__(self) -> str:
        return f"{self.what} at {self.site}"

    def message(self, function: str) -> str:
        """The whole story."""
        advice = EFFECTS[self.kind]
        return (
            f"`{function}`: {self.what}, in Python, at {_site.with_text(self.file, self.line)}.\n"
            f"  what happens: {advice.happens.format(value=self.value)}\n"
            f"  to fix:       {advice.cure}"
        )


STALE = Advice(
    "the compiled step holds the old value as a constant",
    "pass it as an argument, or keep it in a keras.Variable; captures='retrace' traces again when "
    "it changes",
)
LARGE = Advice(
    "it is part of the program, and too large to be compared at every call: a change made to it in "
    "place would go unnoticed",
    "pass it as an argument, or keep it in a keras.Variable",
)
OFTEN = Advice(
    "the step is traced again for every new value",
    "pass it as an argument, or keep it in a keras.Variable",
)
