"""Detects other owners of an object by CPython's reference counts, where that is shown to work.

A buffer with another owner (a snapshot, a second variable, a NumPy view) must not be overwritten.
The code that counts holds references itself; how many depends on the Python version and on how that
code is compiled. So each such piece of code is first run on an object without another owner, which
gives the expected count, and then with and without one. If it misses an owner, or if threads run
without the GIL, nothing is overwritten on this Python: copies are made, and the log says so once.
"""

from __future__ import annotations

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


def expected_count(what: str, trial: Trial) -> int | None:
    """Returns the count of an object without other owners in a piece of code.

    Args:
        what: What is copied if counts are of no use, for the log.
        trial: The code.

    Returns:
        The count, or None if counts do not show other owners.
    """
    recorder = _Recorder()
    trial(recorder, False)
    reason = "threads run without the GIL" if not _has_gil() else ""
    if not reason and not all(
        trial(recorder.count, shared) is shared for _ in range(_RUNS) for shared in (False, True)
    ):
        reason = "reference counts do not show whether it has another owner"
    if reason:
        log.warning("%s is copied, which is slower: on this Python %s", what, reason)
        return None
    return recorder.count


def _has_gil() -> bool:
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())
