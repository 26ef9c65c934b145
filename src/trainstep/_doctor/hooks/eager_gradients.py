"""Gradients that are taken outside of any compiled function, counted by the user's line."""

from __future__ import annotations

from dataclasses import replace
from types import FrameType

from trainstep._doctor.hooks.call_sites import is_ours, site
from trainstep._doctor.hooks.watcher import Watcher
from trainstep._doctor.records import Happened

_LOOP = 4  # gradients at one line that are a loop


class Eager:
    """Counts them."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._counts: dict[tuple[str, str, int], Happened] = {}

    def __call__(self, engine: str, frame: FrameType, *, late: bool = False) -> Happened | None:
        """A gradient was taken in a frame; what it is counted in, if it counts.

        `late`: whether there may have been others before it, which nobody saw.
        """
        if self._watcher.open_traces() or is_ours(frame):
            return None
        place = site(frame)
        if not place.file:
            return None
        key = (engine, place.file, place.line)
        known = self._counts.get(key)
        if known is None:
            what = f"takes a gradient in Python, step by step, in `{place.function}`"
            known = Happened(
                kind="eager", engine=engine, function=place.function, site=place, what=what
            )
            known.detail = "late" if late else ""
            self._counts[key] = known
            return known
        known.count += 1
        # At 4, 8, 16, ...: a killed run tells as much.
        if known.count >= _LOOP and known.count & (known.count - 1) == 0:
            self._watcher.log.note(replace(known))
        return known

    def finish(self) -> None:
        """Notes how many there were."""
        for known in self._counts.values():
            if known.count >= _LOOP:
                self._watcher.log.note(replace(known))
