"""Whether the other processes of a job are alive.

Each process writes a number that grows. The first looks at all of them, the others look at the
first, which also tells them who was lost: the work grows with the processes, not with their square.
A collective of the engine's that waits for a process that is gone may wait for ever; so the one who
notices ends its process from here.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

LOST = 75  # the exit code: a failure that a new attempt may cure
_is_lost = threading.Event()
_FIRST, _OTHERS = "trainstep/pulse/first", "trainstep/pulse/others"
_DONE = "done"
_BEATS = 5  # in the time that a silence may last


class Store(Protocol):
    """A few strings that all processes see."""

    def set(self, key: str, value: str) -> None:
        """Writes one."""
        ...

    def all(self, prefix: str) -> dict[str, str]:
        """Those whose keys begin so."""
        ...


class Pulse:
    """Tells the other processes that this one lives, and ends it when one of them does not.

    Args:
        store: What all processes see.
        index: The number of this process.
        count: How many there are.
        heartbeat: Seconds of silence after which a process is given up.
        end: What ends this process.
    """

    def __init__(
        self,
        store: Store,
        index: int,
        count: int,
        heartbeat: float,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self._store, self._index, self._count, self._heartbeat = store, index, count, heartbeat
        self._end = end or leave
        self._stopped = threading.Event()
        self._heard: dict[int, tuple[str, float]] = {}
        self._answered = 0.0  # when the store did so last

    def start(self) -> None:
        """Begins."""
        atexit.register(self.stop)
        now = time.monotonic()
        self._heard, self._answered = dict.fromkeys(self._peers(), ("", now)), now
        for work in (self._beat, self._watch):
            threading.Thread(target=work, name="trainstep pulse", daemon=True).start()

    def stop(self) -> None:
        """Ends, and lets the others know that this process has done its part."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        if _is_lost.is_set():  # the engine would wait for it once more
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(LOST)
        with contextlib.suppress(Exception):  # the first process may have ended before
            self._store.set(_key(self._index), _DONE)

    def _peers(self) -> list[int]:
        return [p for p in range(self._count) if p != self._index] if self._index == 0 else [0]

    def _beat(self) -> None:
        beat = 0
        while not self._stopped.wait(self._heartbeat / _BEATS):
            beat += 1
            try:
                self._store.set(_key(self._index), str(beat))
                found = self._store.all(_OTHERS if self._index == 0 else _FIRST)
            except Exception:  # who keeps the store is gone: `_watch` counts the time
                continue
            self._answered = time.monotonic()
            lost = self._lost(found)
            if lost is not None and not self._stopped.is_set():
                self._tell(lost)
                return

    def _watch(self) -> None:
        """The first process keeps the store; if it does not answer, a beat waits for ever."""
        while not self._stopped.wait(self._heartbeat / _BEATS):
            if time.monotonic() - self._answered > self._heartbeat:
                self._leave(0)
                return

    def _lost(self, found: dict[str, str]) -> int | None:
        """The number of a process that is gone."""
        told = found.get(f"{_FIRST}/lost")
        if told is not None:
            return int(told)
        now = time.monotonic()
        for peer, (value, since) in self._heard.items():
            new = found.get(_key(peer), value)
            if new not in (value, _DONE):
                self._heard[peer] = (new, now)
            elif new != _DONE and now - since > self._heartbeat:
                return peer
        return None

    def _tell(self, lost: int) -> None:
        if self._index == 0:
            with contextlib.suppress(Exception):
                self._store.set(f"{_FIRST}/lost", str(lost))
                time.sleep(self._heartbeat / _BEATS)  # the store ends with this process
        self._leave(lost)

    def _leave(self, lost: int) -> None:
        self._end(
            f"trainstep: process {lost} of {self._count} was not heard of for "
            f"{self._heartbeat:g} s. Process {self._index} ends, as all others do: restart them, "
            "and they go on from the newest checkpoint."
        )


def _key(index: int) -> str:
    return f"{_OTHERS if index else _FIRST}/{index}"


def note_lost() -> None:
    """A step has failed, since a process is gone: this one ends without waiting for it."""
    _is_lost.set()


def leave(message: str) -> None:
    """Ends the process at once: what waits for a lost one cannot be interrupted."""
    print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(LOST)
