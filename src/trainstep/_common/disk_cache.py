"""The folder in which compiled programs are kept between processes.

An engine with a disk cache of its own gets a folder for the programs that trainstep compiles, and
for nothing else. `TRAINSTEP_CACHE` in the environment, or `set_cache`, sets another folder or turns
the cache off.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from pathlib import Path

_LIMIT = 1 << 30  # bytes; beyond it, the oldest files are deleted until half are left
_OFF = ("", "0", "off", "none")
_override: list[str | None] = []  # empty: `set_cache` was not called


def set_cache(folder: str | os.PathLike[str] | None) -> None:
    """Sets the folder that compiled programs are kept in; None turns the cache off.

    The folder is trusted: anyone who can write to it can run code in your processes.

    Example:
        >>> import trainstep as ts
        >>> ts.set_cache(None)
    """
    _override[:] = [None if folder is None else os.fspath(folder)]


def folder(engine: str, version: str) -> str | None:
    """The folder for an engine's programs on this machine; None if the cache is off."""
    given = _override[0] if _override else os.environ.get("TRAINSTEP_CACHE")
    if (_override and given is None) or (given is not None and given.lower() in _OFF):
        return None
    root = Path(given) if given else _home() / "trainstep"
    return _create(str(root / f"{engine}-{version}-{_machine()}"))


def _home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


@functools.cache
def _machine() -> str:
    """A hash of the processor: a program for one may use instructions that another lacks."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        described = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    except OSError:
        described = []
    text = "\n".join([platform.machine(), platform.processor(), *described[:2]])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@functools.cache
def _create(path: str) -> str | None:
    """Creates the folder and limits its size; None if it cannot be created."""
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
