"""Strangers at the port of the store, and the key that keeps them out."""

from __future__ import annotations

import json
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import pytest

import trainstep as ts
from tests.distribution.test_messages import Bomb
from trainstep._engines.shared import authkey
from trainstep._engines.shared.authkey import job_key
from trainstep._engines.tensorflow import store as module
from trainstep._engines.tensorflow.store import Store, StoreServer

pytestmark = pytest.mark.plain

KEY, OTHER = b"k" * 32, b"o" * 32
Raw = Any  # a `Connection`


@pytest.fixture
def server() -> Iterator[StoreServer]:
    made = StoreServer(("127.0.0.1", 0), KEY, backlog=8)
    yield made
    made.close()


@pytest.fixture
def honest(server: StoreServer) -> Iterator[Store]:
    made = Store(server.address, KEY, timeout=20)
    yield made
    made.close()


def is_served(server: StoreServer, honest: Store) -> None:
    """Asserts that a process with the key, and one that comes later, can write and read."""
    honest.set("shared/a", "1")
    assert honest.all("shared/") == {"shared/a": "1"}
    later = Store(server.address, KEY, timeout=20)
    assert later.get("shared/a", readers=1) == b"1"
    later.close()


def ends(connection: Raw) -> bool:
    """Returns whether the server closes a connection."""
    with connection:
        try:
            while connection.poll(20):
                connection.recv_bytes()
        except (EOFError, OSError):
            return True
    return False


# Without the key ---------------------------------------------------------------------------------


def with_requests(connection: Raw, bomb: bytes) -> None:
    connection.send_bytes(json.dumps({"command": "put", "key": "shared/stolen"}).encode())
    connection.send_bytes(b"1")


def with_a_pickle(connection: Raw, bomb: bytes) -> None:
    connection.send_bytes(bomb)


def with_a_huge_answer(connection: Raw, bomb: bytes) -> None:
    connection.send_bytes(b"x" * 10**6)


def with_a_huge_length(connection: Raw, bomb: bytes) -> None:
    os.write(connection.fileno(), (2**31 - 1).to_bytes(4, "big"))


def with_another_protocol(connection: Raw, bomb: bytes) -> None:
    os.write(connection.fileno(), b"GET / HTTP/1.1\r\n\r\n")


STRANGERS: list[Callable[[Raw, bytes], None]] = [
    with_requests,
    with_a_pickle,
    with_a_huge_answer,
    with_a_huge_length,
    with_another_protocol,
]


@pytest.mark.parametrize("tries", STRANGERS, ids=lambda f: f.__name__)
def test_a_connection_without_the_key_gets_nothing(
    server: StoreServer, honest: Store, tmp_path: Path, tries: Callable[[Raw, bytes], None]
) -> None:
    honest.set("shared/secret", "1")
    connection = Client(server.address)
    received = connection.recv_bytes()  # the challenge
    try:
        tries(connection, pickle.dumps(Bomb(tmp_path / "ran")))
    except OSError:  # closed before all was sent
        pass
    assert b"secret" not in received
    assert ends(connection)
    assert honest.all("shared/stolen") == {}
    assert not (tmp_path / "ran").exists()
    assert honest.get("shared/secret", readers=1) == b"1"
    is_served(server, honest)


def test_a_wrong_key_is_refused(
    server: StoreServer, honest: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "trainstep"):
        with pytest.raises(AuthenticationError):
            Client(server.address, authkey=OTHER)
        is_served(server, honest)
    assert "does not have the job's key" in caplog.text


@pytest.mark.parametrize(
    "part", ["the first process of the job has another key", "expected:", "got:", "to fix:"]
)
def test_a_process_with_another_key_fails_at_once(server: StoreServer, part: str) -> None:
    with pytest.raises(ts.StrategyError) as caught:
        Store(server.address, OTHER, timeout=1000)
    assert part in str(caught.value)


def test_a_server_without_the_key_is_refused() -> None:
    """A process sends nothing to a program that has taken the port."""
    received = []

    def impostor() -> None:
        accepted, _ = listener.accept()
        with Connection(accepted.detach()) as connection:
            connection.send_bytes(b"#CHALLENGE#" + b"c" * 20)
            received.append(connection.recv_bytes())
            connection.send_bytes(b"#WELCOME#")
            received.append(connection.recv_bytes())  # the challenge of the process
            connection.send_bytes(b"wrong")
            received.append(connection.recv_bytes())
            with pytest.raises(EOFError):
                connection.recv_bytes()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(ts.StrategyError, match="another key"):
            Store(listener.getsockname(), KEY, timeout=1000)
        thread.join(20)
    assert len(received) == 3
    assert received[2] == b"#FAILURE#"
    assert all(KEY not in each for each in received)


def test_silent_connections_delay_nobody_and_are_ended(
    server: StoreServer, honest: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = [Client(server.address) for _ in range(20)]
    is_served(server, honest)
    monkeypatch.setattr(module, "_HANDSHAKE", 0.2)
    connection = Client(server.address)
    assert ends(connection)
    for each in patient:
        each.close()


def test_a_silent_server_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(TimeoutError, match=r"no answer from 127\.0\.0\.1:"):
            Store(listener.getsockname(), KEY, timeout=0.5)


def test_the_server_listens_on_its_address_only(server: StoreServer) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.address[1]), timeout=5)


# With the key ------------------------------------------------------------------------------------

REQUESTS = {
    "no JSON": b"{'command'",
    "no object": b"[1]",
    "no command": b"{}",
    "deep": b"[" * 60_000,
    "oversize": json.dumps({"command": "all", "prefix": "x" * 2**17}).encode(),
    "unknown": b'{"command": "drop"}',
    "a method": b'{"command": "_serve"}',
    "without its underscore": b'{"command": "serve"}',
    "the constructor": b'{"command": "__init__", "address": ["0.0.0.0", 0]}',
    "the rest of its name": b'{"command": "_init__"}',
    "the class": b'{"command": "__class__"}',
    "a list": b'{"command": ["get"]}',
    "arguments that are missing": b'{"command": "get", "key": "a"}',
    "arguments too many": b'{"command": "all", "prefix": "", "self": 1}',
    "another connection": b'{"command": "all", "prefix": "", "connection": 1}',
    "a key that is no string": b'{"command": "get", "key": [1], "readers": 1}',
}


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_a_malformed_request_ends_its_connection_only(
    server: StoreServer, honest: Store, caplog: pytest.LogCaptureFixture, request_: bytes
) -> None:
    with caplog.at_level(logging.WARNING, "trainstep"):
        connection = Client(server.address, authkey=KEY)
        connection.send_bytes(request_)
        assert ends(connection)
    assert "closed a connection from ('127.0.0.1'" in caplog.text
    is_served(server, honest)


def test_a_pickle_as_a_request_or_a_value_is_not_run(
    server: StoreServer, honest: Store, tmp_path: Path
) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "ran"))
    connection = Client(server.address, authkey=KEY)
    connection.send_bytes(bomb)
    assert ends(connection)
    honest.put("value", bomb)
    assert honest.get("value", readers=1) == bomb  # bytes, as they came
    assert not (tmp_path / "ran").exists()
    is_served(server, honest)


def test_a_value_that_nobody_writes_is_given_up_in_time(honest: Store) -> None:
    with pytest.raises(TimeoutError, match=r"a was not written within 0.2 s"):
        honest.get("a", readers=1, timeout=0.2)


def test_a_value_is_dropped_after_its_last_reader(server: StoreServer, honest: Store) -> None:
    honest.put("a", b"1")
    assert [honest.get("a", readers=2) for _ in range(2)] == [b"1", b"1"]
    with pytest.raises(TimeoutError):
        honest.get("a", readers=2, timeout=0.2)


# The key -----------------------------------------------------------------------------------------


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the file of the user is; no key is given."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(authkey.KEY, raising=False)
    monkeypatch.delenv(authkey.FILE, raising=False)
    return tmp_path / "state" / "trainstep" / "authkey"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.5.0.1", "localhost"])
def test_on_loopback_the_user_has_a_key_that_stays(state: Path, host: str) -> None:
    key = job_key(host)
    assert len(key) == 64
    assert job_key(host) == key
    assert state.read_bytes() == key
    assert state.stat().st_mode & 0o777 == 0o600
    assert state.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in state.parent.iterdir()] == ["authkey"]


def test_the_mode_of_the_file_does_not_depend_on_the_umask(state: Path) -> None:
    before = os.umask(0)
    try:
        job_key("127.0.0.1")
    finally:
        os.umask(before)
    assert state.stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_processes_that_start_together_have_one_key(state: Path) -> None:
    code = "from trainstep._engines.shared.authkey import job_key; print(job_key('127.0.0.1'))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "KERAS_BACKEND": "jax"}
    keys, begin = set(), threading.Barrier(8)

    def ask() -> None:
        begin.wait(20)
        keys.add(job_key("127.0.0.1"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(keys) == 1
    found = subprocess.run(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, check=True
    )
    assert found.stdout.decode().strip() == str(keys.pop())


@pytest.mark.parametrize("host", ["192.0.2.1", "0.0.0.0", "", "no.such.host.invalid"])
@pytest.mark.parametrize(
    "part",
    [
        "needs a key",
        "expected: `TRAINSTEP_AUTHKEY` or `TRAINSTEP_AUTHKEY_FILE`",
        "got:      neither, and ",
        "is not a loopback address",
        "to fix:   make a key with `python -c",
    ],
)
def test_elsewhere_a_job_without_a_key_is_refused(state: Path, host: str, part: str) -> None:
    with pytest.raises(ts.StrategyError) as caught:
        job_key(host)
    assert part in str(caught.value)
    assert not state.exists()


def test_a_key_from_the_environment_serves_everywhere(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(authkey.KEY, " a key of some length\n")
    assert job_key("192.0.2.1") == job_key("127.0.0.1") == b"a key of some length"
    assert not state.exists()


def test_a_key_from_a_file_serves_everywhere(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    path.write_text("a key of some length\n")
    path.chmod(0o600)
    monkeypatch.setenv(authkey.FILE, str(path))
    assert job_key("192.0.2.1") == job_key("127.0.0.1") == b"a key of some length"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o666])
@pytest.mark.parametrize("named", [True, False])
def test_a_file_that_others_have_access_to_is_refused(
    state: Path, monkeypatch: pytest.MonkeyPatch, mode: int, named: bool
) -> None:
    job_key("127.0.0.1")
    state.chmod(mode)
    if named:
        monkeypatch.setenv(authkey.FILE, str(state))
    with pytest.raises(ts.StrategyError) as caught:
        job_key("127.0.0.1")
    for part in (
        str(state),
        "expected: a file of this user",
        f"got:      mode {mode:o}",
        "to fix:",
    ):
        assert part in str(caught.value)


def test_a_file_of_another_user_is_refused(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job_key("127.0.0.1")
    owner = state.stat().st_uid
    if owner == 0:
        try:
            os.chown(state, 12345, -1)
        except OSError:
            pytest.skip("this user cannot give files away")
        monkeypatch.setattr(os, "geteuid", lambda: 0)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ts.StrategyError, match=r"got:      a file of user \d+"):
        job_key("127.0.0.1")


def test_a_file_that_is_not_there_is_refused(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(authkey.FILE, str(tmp_path / "none"))
    with pytest.raises(ts.StrategyError, match=r"got:.*No such file"):
        job_key("127.0.0.1")


def test_a_user_without_a_place_for_the_file_is_told_what_to_set(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(ts.StrategyError, match=r"to fix:.*set TRAINSTEP_AUTHKEY in every process"):
        job_key("127.0.0.1")


@pytest.mark.parametrize("key", ["", "short"])
def test_a_short_key_is_refused(state: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv(authkey.KEY, key)
    with pytest.raises(ts.StrategyError) as caught:
        job_key("192.0.2.1")
    for part in ("too short", "expected: 16 bytes", f"got:      {len(key)} bytes", "to fix:"):
        assert part in str(caught.value)
    assert not key or f"'{key}'" not in str(caught.value)  # no part of a key is printed


@pytest.mark.slow
def test_the_store_does_not_import_tensorflow() -> None:
    code = (
        "import sys; import trainstep._engines.tensorflow.store; print('tensorflow' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "KERAS_BACKEND": "jax"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, check=True
    )
    assert found.stdout.strip() == b"False"
