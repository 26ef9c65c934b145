"""trainstep's own functions: their ledger already has every trace with its causes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from types import FrameType

from trainstep._common.import_hooks import Patches
from trainstep._doctor.hooks.call_sites import defined, site
from trainstep._doctor.hooks.watcher import Watcher, side_effect
from trainstep._doctor.records import NOWHERE, Cause, Incident, Trace
from trainstep._explain.causes import Effect
from trainstep._explain.ledger import Ledger, TraceEvent, listeners


class TrainstepFunctions:
    """A listener to the ledgers of all functions."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._groups: dict[str, str] = {}  # by name: the function traced last
        self._effects: dict[str, list[Effect]] = {}  # by name: those of the open trace

    def install(self, patches: Patches) -> None:
        """Registers the listener."""
        listeners.append(self)
        patches.undo_later(functools.partial(listeners.remove, self))

    def traced(self, ledger: Ledger, event: TraceEvent) -> None:
        """Records an entry of a ledger."""
        frame = sys._getframe(1)
        self._watcher.guarded(lambda: self._traced(ledger, event, frame))

    def _traced(self, ledger: Ledger, event: TraceEvent, frame: FrameType) -> None:
        if event.kind not in ("trace", "bucket"):
            return
        kinds = event.kinds or ("unknown",) * len(event.changes)
        trace = Trace(
            engine="trainstep",
            group=f"trainstep:{self._watcher.serial_number(ledger, 'ledger')}",
            function=event.function,
            defined=NOWHERE if ledger.code is None else defined(ledger.code),
            called=site(frame),
            what="trace" if event.runs_python else "compile",
            signature=event.signature,
            causes=[Cause(kind, text) for kind, text in zip(kinds, event.changes, strict=False)],
            from_disk=event.from_disk,
        )
        if not event.runs_python:
            trace.causes, trace.mode = [], f"program {event.index}"
        self._watcher.log.begin(trace)
        spent = {"trace": event.trace_seconds, "compile": event.compile_seconds}
        trace.seconds = {phase: round(each, 6) for phase, each in spent.items() if each}
        self._watcher.log.note(trace)
        self._groups[event.function] = trace.group
        for effect in self._effects.pop(event.function, []):
            self._watcher.log.note(side_effect(trace, effect))

    def affected(self, function: str, effect: Effect) -> None:
        """Stores a side effect until its trace is recorded."""
        self._effects.setdefault(function, []).append(effect)

    def stale(self, function: str, changes: Sequence[tuple[str, str, str]]) -> None:
        """Records captured values that have changed."""
        where = site(sys._getframe(1))
        for label, before, now in changes:
            self._watcher.log.note(
                Incident(
                    kind="stale",
                    engine="trainstep",
                    group=self._groups.get(function, ""),
                    function=function,
                    site=where,
                    what=label,
                    before=before,
                    now=now,
                    noticed=where,
                )
            )
