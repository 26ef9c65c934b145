"""Counts gradients outside of any compiled function, by the user's line."""

from __future__ import annotations

from dataclasses import replace
from types import FrameType

from trainstep._doctor.hooks.call_sites import called_by_trainstep, site
from trainstep._doctor.hooks.watcher import Watcher
from trainstep._doctor.records import Incident

_LOOP = 4  # this many gradients at one line are a loop


class EagerGradients:
    """Counts eager gradients."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._counts: dict[tuple[str, str, int], Incident] = {}

    def __call__(self, engine: str, frame: FrameType, *, late: bool = False) -> Incident | None:
        """Counts a gradient and returns the incident that counts it, if any.

        `late`: whether earlier gradients at this line may not have been counted.
        """
        if self._watcher.open_traces() or called_by_trainstep(frame):
            return None
        place = site(frame)
        if not place.file:
            return None
        key = (engine, place.file, place.line)
        known = self._counts.get(key)
        if known is None:
            what = f"computes gradients outside of any compiled function, in `{place.function}`"
            known = Incident(
                kind="eager", engine=engine, function=place.function, site=place, what=what
            )
            known.detail = "late" if late else ""
            self._counts[key] = known
            return known
        known.count += 1
        # Recorded at 4, 8, 16, ..., so that the log of a killed run has a count too.
        if known.count >= _LOOP and known.count & (known.count - 1) == 0:
            self._watcher.log.note(replace(known))
        return known

    def finish(self) -> None:
        """Records the final counts."""
        for known in self._counts.values():
            if known.count >= _LOOP:
                self._watcher.log.note(replace(known))
