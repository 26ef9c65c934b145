"""Compiles in a background thread: a closer program, while a larger one serves.

The threads compile one at a time. They are not daemons, so that Python waits for them at exit: the
engines' compilers crash if they are cut off.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger("trainstep")
_one_at_a_time = threading.Lock()
_threads: set[threading.Thread] = set()


def start(work: Callable[[], None]) -> None:
    """Starts a thread that runs `work`."""

    def run() -> None:
        try:
            with _one_at_a_time:
                work()
        except Exception:  # the larger program keeps serving
            log.exception("a program could not be compiled in the background")
        finally:
            _threads.discard(threading.current_thread())

    thread = threading.Thread(target=run, name="trainstep-compile")
    _threads.add(thread)
    try:
        thread.start()
    except RuntimeError:  # since Python 3.12, no thread starts once the main thread has ended
        _threads.discard(thread)
        log.debug("no thread can be started: the larger program keeps serving")


def wait() -> None:
    """Waits until no thread is compiling.

    Example:
        >>> from trainstep.testing import wait_for_compilation
        >>> wait_for_compilation()
    """
    for thread in list(_threads):
        thread.join()
