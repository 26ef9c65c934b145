"""Chooses between two compilers by measuring: `function(optimize="measure")`.

The faster compiler of an engine depends on the model. Both programs compute the same step, so both
can train: the first calls alternate between them, and then the faster one stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from trainstep._engines import Executable

_ROUNDS = 12  # calls to each
_WARM = 2  # of these, calls that are not counted


class MeasuringExecutable:
    """An executable that measures several others and reports the fastest to `decided`."""

    def __init__(
        self, candidates: dict[str, Executable], decided: Callable[[str, Executable], None]
    ) -> None:
        self._candidates = candidates
        self._seconds: dict[str, list[float]] = {name: [] for name in candidates}
        self._decided = decided

    def __call__(self, leaves: Sequence[Any]) -> Sequence[Any]:
        name = min(self._seconds, key=lambda n: len(self._seconds[n]))
        started = time.perf_counter()
        outputs = self._candidates[name](leaves)
        self._seconds[name].append(time.perf_counter() - started)
        if all(len(seconds) >= _ROUNDS for seconds in self._seconds.values()):
            best = min(self._seconds, key=lambda n: median(self._seconds[n][_WARM:]))
            self._decided(best, self._candidates[best])
        return outputs
