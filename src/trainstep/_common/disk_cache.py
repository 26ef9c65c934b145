"""Where compiled programs are kept from one process to the next.

An engine that has a cache on disk of its own is given a folder for what trainstep compiles, and
for nothing else. `TRAINSTEP_CACHE` in the environment, or `set_cache`, names another folder, or
turns it off.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from pathlib import Path

_LIMIT = 1 << 30  # bytes; past it, half of them go, the oldest first
_OFF = ("", "0", "off", "none")
_set: list[str | None] = []


def set_cache(folder: str | os.PathLike[str] | None) -> None:
    """Sets the folder that compiled programs are kept in; None turns the cache off.

    It is trusted: whoever can write to it can run code in your processes.

    Example:
        >>> import trainstep as ts
        >>> ts.set_cache(None)
    """
    _set[:] = [None if folder is None else os.fspath(folder)]


def folder(engine: str, version: str) -> str | None:
    """The folder for an engine's programs on this machine; None if there is to be none."""
    given = _set[0] if _set else os.environ.get("TRAINSTEP_CACHE")
    if (_set and given is None) or (given is not None and given.lower() in _OFF):
        return None
    root = Path(given) if given else _home() / "trainstep"
    return _made(str(root / f"{engine}-{version}-{_machine()}"))


def _home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


@functools.cache
def _machine() -> str:
    """Tells processors apart: a program for one may use instructions that another has not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        described = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    except OSError:
        described = []
    text = "\n".join([platform.machine(), platform.processor(), *described[:2]])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@functools.cache
def _made(path: str) -> str | None:
    """The folder, made and of limited size; None where none can be made."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        _prune(Path(path))
    except OSError:
        return None
    return path


def _prune(path: Path) -> None:
    found = [(entry.stat(), entry) for entry in path.iterdir() if entry.is_file()]
    size = sum(status.st_size for status, _ in found)
    if size <= _LIMIT:
        return
    for status, entry in sorted(found, key=lambda pair: pair[0].st_mtime):
        entry.unlink(missing_ok=True)
        size -= status.st_size
        if size <= _LIMIT // 2:
            return
