"""A server kept to one address; between two processes it is tried in `test_processes`."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator

import keras
import pytest

from trainstep._engines.tensorflow.listen_filter import hear_only

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the filters are Linux's")


@contextlib.contextmanager
def connected(host: str) -> Iterator[tuple[socket.socket, socket.socket, socket.socket]]:
    """A server at an address, a client, and the server's side of their connection."""
    with socket.create_server((host, 0)) as server:
        with socket.create_connection(server.getsockname(), timeout=5) as client:
            accepted, _ = server.accept()
            with accepted:
                yield server, client, accepted


def test_who_came_by_another_address_is_cut_off() -> None:
    with connected("127.0.0.2") as (server, client, _):
        hear_only("127.0.0.1", server.getsockname()[1])
        assert client.recv(1) == b""


def test_who_comes_by_the_address_stays() -> None:
    with connected("127.0.0.1") as (server, client, accepted):
        hear_only("127.0.0.1", server.getsockname()[1])
        accepted.sendall(b"here")
        assert client.recv(4) == b"here"
        with socket.create_connection(server.getsockname(), timeout=5):
            server.accept()[0].close()


def test_without_a_server_it_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(OSError, match=f"no server of this process listens at port {port}"):
        hear_only("127.0.0.1", port)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="its runtime binds to all")
def test_a_port_that_stays_open_is_warned_of() -> None:
    from trainstep._engines.tensorflow.processes import _hear_only

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.warns(UserWarning, match=rf"(?s)all interfaces.*port {port}.*kept to 127.0.0.1"):
        _hear_only(f"127.0.0.1:{port}")
