"""A cure: a small program with a fault and without it, and a number that tells them apart.

The number is counted without doctor: traces of a function (a counter in its body), programs that
a compiler was given, or results that are wrong. Doctor's advice is what the programs with `cured`
do differently, so each cure here is the proof of a line of advice.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from .running import HERE

Program = Callable[[bool], int]


@dataclass(frozen=True)
class Cure:
    """A program, the kind of cause or finding that it shows, and its numbers."""

    kind: str
    before: int
    after: int
    run: Program
    slow: bool = False  # whether it takes processes, or says what another says too

    def __str__(self) -> str:
        return f"{self.kind}: {self.run.__name__}"


class Cures(list[Cure]):
    """The cures of one engine."""

    def add(
        self, kind: str, before: int, after: int, *, slow: bool = False
    ) -> Callable[[Program], Program]:
        """Registers a program that takes whether it is cured and returns its number."""

        def register(run: Program) -> Program:
            self.append(Cure(kind, before, after, run, slow))
            return run

        return register


class Runs:
    """Counts the runs of a traced body: call it there."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> None:
        self.number += 1


def loaded_witness() -> ModuleType:
    """The scripts' witness, listening to the functions that Keras makes; loaded once."""
    if not _loaded:
        spec = importlib.util.spec_from_file_location("witness", HERE / "site-packages/witness.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.keras_steps()
        _loaded.append(module)
    return _loaded[0]


_loaded: list[ModuleType] = []


def keras_traces(run: Callable[[], None]) -> int:
    """How often Keras's step functions are traced while `run` runs."""
    witness = loaded_witness()
    witness.COUNTS.clear()
    run()
    return sum(witness.COUNTS.values())
