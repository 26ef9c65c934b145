"""Work that need not be waited for: compiling a closer program while a larger one serves.

One piece of work at a time. The thread is not a daemon: Python waits for it at its end, because
the engines' compilers do not survive being cut off in the middle.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger("trainstep")
_one_at_a_time = threading.Lock()
_threads: set[threading.Thread] = set()


def start(work: Callable[[], None]) -> None:
    """Starts some work."""

    def run() -> None:
        try:
            with _one_at_a_time:
                work()
        except Exception:  # the larger program goes on serving
            log.exception("a program could not be compiled in the background")
        finally:
            _threads.discard(threading.current_thread())

    thread = threading.Thread(target=run, name="trainstep-compile")
    _threads.add(thread)
    thread.start()


def wait() -> None:
    """Waits until no work is left.

    Example:
        >>> from trainstep.testing import wait_for_compilation
        >>> wait_for_compilation()
    """
    for thread in list(_threads):
        thread.join()
