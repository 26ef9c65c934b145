"""The key that the processes of a job share, and authenticate each other with.

It is looked up in this order:

    TRAINSTEP_AUTHKEY        the key itself
    TRAINSTEP_AUTHKEY_FILE   a file with the key, which only its owner can read
    a file of the user       on a loopback address only; created when it is first needed

The file of the user is `trainstep/authkey` in `$XDG_STATE_HOME` (`~/.local/state`). It is created
once and serves all jobs of the user, so there is nothing to clean up after a job. Other machines do
not have it; a job on any other address has to be given a key.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import stat
import tempfile
from pathlib import Path

from trainstep._common.errors import StrategyError

KEY, FILE = "TRAINSTEP_AUTHKEY", "TRAINSTEP_AUTHKEY_FILE"
_SHORTEST = 16  # bytes; a recorded handshake allows shorter keys to be guessed
_LONGEST = 4096
_NEW_KEY = "python -c 'import secrets; print(secrets.token_hex(32))'"


def job_key(host: str) -> bytes:
    """Returns the key of the job whose first process listens on a host.

    Raises:
        StrategyError: There is no key and the host is not a loopback address, the key is too short,
            or others can read its file.
    """
    if KEY in os.environ:
        return _checked(os.fsencode(os.environ[KEY]).strip(), f"`{KEY}`")
    if FILE in os.environ:
        path = Path(os.environ[FILE])
        return _checked(_read(path), f"{path}, which `{FILE}` names")
    if not _is_loopback(host):
        raise StrategyError(
            f"a job at {host} needs a key that its processes share.\n"
            f"  expected: `{KEY}` or `{FILE}` in the environment of every process\n"
            f"  got:      neither, and {host} is not a loopback address\n"
            f"  to fix:   make a key with `{_NEW_KEY}`, and set {KEY} to it in every process; or "
            f"write it to a file with mode 600, and set {FILE} to the path"
        )
    path = _user_file()
    return _checked(_read(path), str(path))


def _is_loopback(host: str) -> bool:
    """Returns whether a host name has loopback addresses only."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(each).partition("%")[0]).is_loopback for each in found)


def _user_file() -> Path:
    """Returns the path of the user's own file, and creates it if it is missing."""
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        path = Path(state) / "trainstep" / "authkey"
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _create(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        raise _unreadable("the file of the user's own key", str(error)) from error
    return path


def _create(path: Path) -> None:
    """Writes a new key, unless another process has just written one.

    The link makes the file appear complete: a process that finds it can read the key.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent)  # with mode 600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)


def _read(path: Path) -> bytes:
    """Returns the content of a file that only its owner can read."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            key = file.read(_LONGEST)
    except OSError as error:
        raise _unreadable(str(path), str(error)) from error
    if not hasattr(os, "geteuid"):
        raise _unreadable(str(path), "a system whose files have neither owners nor modes")
    if status.st_uid not in (os.geteuid(), 0):
        raise _unreadable(str(path), f"a file of user {status.st_uid}")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise _unreadable(str(path), f"mode {mode:o}: others have access")
    return key.strip()


def _checked(key: bytes, where: str) -> bytes:
    if len(key) >= _SHORTEST:
        return key
    raise StrategyError(
        "the key of the job is too short.\n"
        f"  expected: {_SHORTEST} bytes or more in {where}\n"
        f"  got:      {len(key)} bytes\n"
        f"  to fix:   make a key with `{_NEW_KEY}`"
    )


def _unreadable(where: str, got: str) -> StrategyError:
    return StrategyError(
        f"the key of the job cannot be read from {where}.\n"
        "  expected: a file of this user, with mode 600\n"
        f"  got:      {got}\n"
        f"  to fix:   `chmod 600` it, and make a new key if others have read it; or set {KEY} in "
        "every process"
    )
