"""Work that another thread does one item ahead of its turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any


def ahead(make: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """What is made of each item; another thread makes the next one meanwhile."""
    # Not a pool, which takes no more work once the main thread has ended; this one may be another.
    asked: SimpleQueue[Any] = SimpleQueue()
    made: SimpleQueue[Any] = SimpleQueue()

    def work() -> None:
        while (item := asked.get()) is not None:
            try:
                made.put((make(item), None))
            except BaseException as error:
                made.put((None, error))

    def ready() -> Any:
        value, error = made.get()
        if error is not None:
            raise error
        return value

    other = threading.Thread(target=work, name="trainstep-rows", daemon=True)
    other.start()
    try:
        for count, item in enumerate(items):
            asked.put(item)
            if count:
                yield ready()
        yield ready()
    finally:
        asked.put(None)
        other.join()
