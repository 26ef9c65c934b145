"""A key-value store in the first process of a job, for an engine that has none.

    Store, in each process -- request (JSON) --------------> StoreServer, in the first process
                           -- value (bytes), after "put" -->
                           <- value (bytes), after "get" ---

The server listens on the address that it is given and on no other. Each side proves that it has the
key of the job before the other reads a request or an answer. The server stores values as bytes and
does not decode them. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any

from trainstep._common.errors import StrategyError

Address = tuple[str, int]
_log = logging.getLogger("trainstep")
_HANDSHAKE = 60.0  # seconds that a new connection has to prove that it has the key
# Bytes. The size of a value has no bound: it may be all weights, and its sender has the key.
_LARGEST_REQUEST = 2**16


class StoreServer:
    """Stores the values, and serves each connection in a thread of its own.

    Args:
        address: The address to listen on.
        key: The key of the job.
        backlog: How many processes may connect at the same moment.
    """

    def __init__(self, address: Address, key: bytes, backlog: int) -> None:
        self._key = key
        self._socket = socket.create_server(address, backlog=backlog)
        self.address: Address = self._socket.getsockname()
        self._is_closed = False
        self._values: dict[str, bytes] = {}
        self._reads_left: dict[str, int] = {}
        self._changed = threading.Condition()
        self._commands: dict[str, Callable[..., bytes | None]] = {
            "put": self._put,
            "get": self._get,
            "all": self._all,
        }
        _start(self._accept)

    def close(self) -> None:
        """Accepts no more connections; open ones are still served."""
        self._is_closed = True
        with contextlib.suppress(OSError):  # wakes the thread that accepts
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                accepted, peer = self._socket.accept()
                _start(self._serve, Connection(accepted.detach()), peer)
            except (OSError, RuntimeError):  # too many files or threads: some may end
                time.sleep(0.1)

    def _serve(self, connection: Connection[Any, Any], peer: Any) -> None:
        """Serves one connection until it ends.

        A failure closes the connection: the process at the other end then fails as well, and does
        not wait for an answer that never comes.
        """
        with connection:
            try:
                # In this thread, not in the one that accepts: a silent peer delays no other.
                with _time_limit(connection, _HANDSHAKE):
                    deliver_challenge(connection, self._key)
                    answer_challenge(connection, self._key)
                while True:
                    self._answer(connection)
            except (EOFError, ConnectionError):  # the peer has closed it
                return
            except AuthenticationError:
                _log.warning("refused a connection from %s: it does not have the job's key", peer)
            except Exception as error:
                _log.warning(
                    "closed a connection from %s: %s: %s", peer, type(error).__name__, error
                )

    def _answer(self, connection: Connection[Any, Any]) -> None:
        request = json.loads(connection.recv_bytes(_LARGEST_REQUEST))
        name = request.pop("command")
        if name not in self._commands:
            raise ValueError(f"unknown command {name!r}")
        found = self._commands[name](connection, **request)
        if found is not None:
            connection.send_bytes(found)

    def _put(self, connection: Connection[Any, Any], key: str) -> None:
        value = connection.recv_bytes()
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def _get(self, connection: Connection[Any, Any], key: str, readers: int) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values)
            value = self._values[key]
            self._reads_left[key] = self._reads_left.get(key, readers) - 1
            if self._reads_left[key] == 0:
                del self._values[key], self._reads_left[key]
        return value

    def _all(self, connection: Connection[Any, Any], prefix: str) -> bytes:
        with self._changed:
            found = {k: v.decode() for k, v in self._values.items() if k.startswith(prefix)}
        return json.dumps(found).encode()


class Store:
    """The connection of one process to the server.

    A thread that waits for a value blocks all other threads that use the same `Store`.

    Args:
        address: The address of the server.
        key: The key of the job.
        timeout: Seconds to wait for the server to start.

    Raises:
        StrategyError: The server has another key.
        OSError: There is no server after `timeout`.
    """

    def __init__(self, address: Address, key: bytes, timeout: float) -> None:
        limit = time.monotonic() + timeout
        self._lock = threading.Lock()
        while True:
            try:
                self._connection = _connect(address, key, max(limit - time.monotonic(), 1.0))
                return
            except (OSError, EOFError) as error:  # the server may not have started yet
                if time.monotonic() > limit:
                    raise TimeoutError(f"no answer from {address[0]}:{address[1]}") from error
                time.sleep(0.1)

    @property
    def own_host(self) -> str:
        """The address of this machine on the network by which it reaches the server."""
        with _second_handle(self._connection) as own:
            return str(own.getsockname()[0])

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()

    def put(self, key: str, value: bytes) -> None:
        """Writes a value, without waiting for the server."""
        with self._lock:
            self._connection.send_bytes(_request("put", key=key))
            self._connection.send_bytes(value)

    def get(self, key: str, readers: int, timeout: float | None = None) -> bytes:
        """Waits for a value and returns it. The server drops it after `readers` reads.

        Raises:
            TimeoutError: The value was not written within `timeout` seconds. Its answer may still
                arrive, so nothing else can be read by this `Store`.
        """
        with self._lock:
            self._connection.send_bytes(_request("get", key=key, readers=readers))
            if not self._connection.poll(timeout):
                raise TimeoutError(f"{key} was not written within {timeout:g} s")
            return self._connection.recv_bytes()

    def set(self, key: str, value: str) -> None:
        """Writes a string."""
        self.put(key, value.encode())

    def all(self, prefix: str) -> dict[str, str]:
        """Returns the strings whose keys begin with a prefix."""
        with self._lock:
            self._connection.send_bytes(_request("all", prefix=prefix))
            found: dict[str, str] = json.loads(self._connection.recv_bytes())
        return found


def _request(command: str, **arguments: Any) -> bytes:
    return json.dumps({"command": command, **arguments}).encode()


def _connect(address: Address, key: bytes, timeout: float) -> Connection[Any, Any]:
    connection = Client(address)
    try:
        with _time_limit(connection, timeout):
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
    except (AuthenticationError, AssertionError) as error:  # the latter: no challenge was sent
        connection.close()
        raise StrategyError(
            "the first process of the job has another key.\n"
            f"  expected: a store at {address[0]}:{address[1]} with the key of this process\n"
            f"  got:      {type(error).__name__}: {error}\n"
            "  to fix:   set the same TRAINSTEP_AUTHKEY in all processes; check that no other "
            "program has this port"
        ) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _start(work: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=work, args=arguments, name="trainstep store", daemon=True).start()


@contextlib.contextmanager
def _time_limit(connection: Connection[Any, Any], seconds: float) -> Iterator[None]:
    """Ends the connection if the block takes longer: the block then fails with an EOFError."""
    with _second_handle(connection) as own:

        def end() -> None:
            with contextlib.suppress(OSError):  # it has ended already
                own.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _second_handle(connection: Connection[Any, Any]) -> socket.socket:
    """Returns a socket with the methods that a `Connection` lacks."""
    return socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM)
