"""A few values that all processes of a job see, kept by the first: for an engine that has none.

The first process listens on the address that it was given, and on no other. Nothing that goes over
it is encrypted or authenticated.
"""

from __future__ import annotations

import json
import threading
import time
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

Address = tuple[str, int]


class Kept:
    """What the first process keeps, and the threads that answer for it."""

    def __init__(self, address: Address, backlog: int) -> None:
        self._listener = Listener(address, backlog=backlog)
        self._values: dict[str, bytes] = {}
        self._left: dict[str, int] = {}  # how often a value is still to be read
        self._changed = threading.Condition()
        threading.Thread(target=self._accept, name="trainstep store", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve, args=(connection,), name="trainstep store", daemon=True
            ).start()

    def _serve(self, connection: Connection[Any, Any]) -> None:
        try:
            while True:
                ask = json.loads(connection.recv_bytes())
                found = getattr(self, "_" + ask.pop("do"))(connection, **ask)
                if found is not None:
                    connection.send_bytes(found)
        except (EOFError, OSError):
            connection.close()

    def _set(self, connection: Connection[Any, Any], key: str) -> None:
        value = connection.recv_bytes()
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def _get(self, connection: Connection[Any, Any], key: str, readers: int) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values)
            value = self._values[key]
            self._left[key] = self._left.get(key, readers) - 1
            if self._left[key] == 0:
                del self._values[key], self._left[key]
        return value

    def _all(self, connection: Connection[Any, Any], prefix: str) -> bytes:
        with self._changed:
            found = {k: v.decode() for k, v in self._values.items() if k.startswith(prefix)}
        return json.dumps(found).encode()


class Store:
    """What one process sees of it. A thread that waits for a value keeps others waiting.

    Args:
        address: Where the first process listens.
        timeout: Seconds to wait for it.
    """

    def __init__(self, address: Address, timeout: float) -> None:
        limit = time.monotonic() + timeout
        self._lock = threading.Lock()
        while True:
            try:
                self._connection = Client(address)
                return
            except OSError:  # it may not have been started yet
                if time.monotonic() > limit:
                    raise
                time.sleep(0.1)

    def _ask(self, **what: Any) -> bytes:
        with self._lock:
            self._connection.send_bytes(json.dumps(what).encode())
            return self._connection.recv_bytes()

    def put(self, key: str, value: bytes) -> None:
        """Writes a value; nobody answers, so it does not wait for the first process."""
        with self._lock:
            self._connection.send_bytes(json.dumps({"do": "set", "key": key}).encode())
            self._connection.send_bytes(value)

    def get(self, key: str, readers: int) -> bytes:
        """Reads a value, when it is there; after so many have read it, it is gone."""
        return self._ask(do="get", key=key, readers=readers)

    def set(self, key: str, value: str) -> None:
        """Writes a string."""
        self.put(key, value.encode())

    def all(self, prefix: str) -> dict[str, str]:
        """The strings whose keys begin so."""
        found: dict[str, str] = json.loads(self._ask(do="all", prefix=prefix))
        return found
