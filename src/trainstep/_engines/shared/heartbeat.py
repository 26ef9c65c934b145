"""Detects lost processes of a job.

Each process writes a growing number to the store. The first process checks all others; the others
check the first, which also reports lost processes to them. So the work grows with the number of
processes, not with its square. A collective that waits for a lost process may block for ever, so a
process that detects the loss exits from the thread here.
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

LOST = 75  # the exit code (EX_TEMPFAIL): a retry may succeed
_is_lost = threading.Event()
_FIRST, _OTHERS = "trainstep/pulse/first", "trainstep/pulse/others"
_DONE = "done"
_BEATS = 5  # beats per heartbeat timeout


class Store(Protocol):
    """Strings that all processes share."""

    def set(self, key: str, value: str) -> None:
        """Writes a string."""
        ...

    def all(self, prefix: str) -> dict[str, str]:
        """Returns the strings whose keys begin with a prefix."""
        ...


class Pulse:
    """Reports to the other processes that this one is alive, and ends it when another is lost.

    Args:
        store: The strings that all processes share.
        index: The index of this process.
        count: The number of processes.
        heartbeat: Seconds without a beat after which a process counts as lost.
        end: Ends this process.
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
        self._last_beats: dict[int, tuple[str, float]] = {}  # value and time, by process
        self._last_answer = 0.0  # time of the store's last answer

    def start(self) -> None:
        """Starts the threads."""
        atexit.register(self.stop)
        now = time.monotonic()
        self._last_beats, self._last_answer = dict.fromkeys(self._peers(), ("", now)), now
        for work in (self._beat, self._watch):
            threading.Thread(target=work, name="trainstep pulse", daemon=True).start()

    def stop(self) -> None:
        """Stops the threads, and reports to the others that this process is done."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        if _is_lost.is_set():  # the engine's own shutdown would wait for the lost process
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
            except Exception:  # the process with the store is gone: `_watch` measures how long
                continue
            self._last_answer = time.monotonic()
            lost = self._lost(found)
            if lost is not None and not self._stopped.is_set():
                self._report(lost)
                return

    def _watch(self) -> None:
        """Checks that the store answers: `_beat` blocks for ever if the first process hangs."""
        while not self._stopped.wait(self._heartbeat / _BEATS):
            if time.monotonic() - self._last_answer > self._heartbeat:
                self._leave(0)
                return

    def _lost(self, found: dict[str, str]) -> int | None:
        """Returns the index of a lost process."""
        reported = found.get(f"{_FIRST}/lost")
        if reported is not None:
            return int(reported)
        now = time.monotonic()
        for peer, (value, since) in self._last_beats.items():
            new = found.get(_key(peer), value)
            if new not in (value, _DONE):
                self._last_beats[peer] = (new, now)
            elif new != _DONE and now - since > self._heartbeat:
                return peer
        return None

    def _report(self, lost: int) -> None:
        if self._index == 0:
            with contextlib.suppress(Exception):
                self._store.set(f"{_FIRST}/lost", str(lost))
                time.sleep(self._heartbeat / _BEATS)  # the store ends with this process
        self._leave(lost)

    def _leave(self, lost: int) -> None:
        self._end(
            f"trainstep: process {lost} of {self._count} sent no heartbeat for "
            f"{self._heartbeat:g} s. Process {self._index} and all others end. Restart them to "
            "continue from the newest checkpoint."
        )


def _key(index: int) -> str:
    return f"{_OTHERS if index else _FIRST}/{index}"


def note_lost() -> None:
    """Notes that a step failed because a process is lost: this one ends without waiting for it."""
    _is_lost.set()


def leave(message: str) -> None:
    """Ends this process at once: a collective that waits for a lost one cannot be interrupted."""
    print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(LOST)
