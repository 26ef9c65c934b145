"""Prefetch: another thread computes the next item while the caller uses this one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any


def prefetch(make: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """Yields `make(item)` for each item, computed one item ahead on another thread."""
    # A pool of `concurrent.futures` refuses work once the main thread has ended, and the caller may
    # be a thread that outlives it.
    requests: SimpleQueue[Any] = SimpleQueue()
    results: SimpleQueue[Any] = SimpleQueue()

    def work() -> None:
        while (item := requests.get()) is not None:
            try:
                results.put((make(item), None))
            except BaseException as error:  # raised again in the caller's thread
                results.put((None, error))

    def next_result() -> Any:
        value, error = results.get()
        if error is not None:
            raise error
        return value

    thread = threading.Thread(target=work, name="trainstep-rows", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # since Python 3.12, no thread starts once the main thread has ended
        yield from map(make, items)
        return
    try:
        for count, item in enumerate(items):
            requests.put(item)
            if count:
                yield next_result()
        yield next_result()
    finally:  # also runs if the caller drops this generator halfway
        requests.put(None)
        thread.join()
