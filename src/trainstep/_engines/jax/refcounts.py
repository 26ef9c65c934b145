"""Detects other owners of an object by CPython's reference counts, where that is shown to work.

A buffer with another owner (a snapshot, a second variable, a NumPy view) must not be overwritten.
The code that counts holds references itself; how many depends on the Python version and on how that
code is compiled. So each such piece of code is first run on an object without another owner, which
gives the expected count, and then on objects with one. If it misses an owner, or if threads run
without the GIL, nothing is overwritten on this Python: copies are made, and the log says so once.
"""

from __future__ import annotations

import _thread
import logging
import sys
from collections.abc import Callable
from typing import Any

log = logging.getLogger("trainstep")
refcount: Callable[[Any], int] = getattr(sys, "getrefcount", lambda value: sys.maxsize)
# Runs of each kind of test: Python specializes the instructions of code that has run some times.
_RUNS = 64

# Runs code that compares a count by `refcount(x) > expected`, given `expected` and whether `x` has
# another owner. Returns whether the code found one.
Trial = Callable[[Any, bool], bool]


class _Recorder:
    """Replaces an expected count, and records the count that is compared with it."""

    def __init__(self) -> None:
        self.count = 0

    def __lt__(self, count: int) -> bool:
        self.count = count
        return False


def expected_count(what: str, trial: Trial, most: int) -> int | None:
    """Returns the count of an object without other owners in a piece of code.

    Args:
        what: What is copied if counts are of no use, for the log.
        trial: The code.
        most: The references that the code has by its text. A debugger may hold more.

    Returns:
        The count, or None if counts do not show other owners.
    """
    reason, count = "", 0
    if not _has_gil():
        reason = "threads run without the GIL"
    else:
        count, found = _in_a_thread(lambda: _measured(trial, most))
        if not found:
            reason = "reference counts do not show whether it has another owner"
    if reason:
        log.warning("%s is copied, which is slower: on this Python %s", what, reason)
        return None
    return count


def _measured(trial: Trial, most: int) -> tuple[int, bool]:
    """Returns the count, and whether it shows every other owner."""
    recorder = _Recorder()
    trial(recorder, False)
    count = min(recorder.count, most)
    return count, all(trial(count, True) for _ in range(_RUNS))


def _in_a_thread(fn: Callable[[], tuple[int, bool]]) -> tuple[int, bool]:
    """Calls a function where no debugger or profiler looks: its frames would hold references."""
    results: list[tuple[int, bool]] = []
    done = _thread.allocate_lock()
    done.acquire()

    def run() -> None:
        try:
            results.append(fn())
        finally:
            done.release()

    try:
        _thread.start_new_thread(run, ())  # unlike `threading`, it installs no hooks
    except RuntimeError:  # since Python 3.12, no thread starts once the main thread has ended
        return fn()
    done.acquire()
    return results[0]


def _has_gil() -> bool:
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())
