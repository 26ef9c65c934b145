"""Processes that a script starts: each is watched, and writes its records into a folder.

A child finds the folder in its environment, and `boot/sitecustomize.py` on its path, which Python
runs before anything else.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from trainstep._doctor._records import read
from trainstep._doctor._session import Doctor

_FOLDER = "TRAINSTEP_DOCTOR"
_BOOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "boot")


def prepare() -> str:
    """Makes the folder, and has children find it."""
    folder = tempfile.mkdtemp(prefix="trainstep-doctor-")
    os.environ[_FOLDER] = folder
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = _BOOT if not path else os.pathsep.join([_BOOT, path])
    return folder


def records(folder: str) -> list[Any]:
    """What the children have written."""
    found: list[Any] = []
    for file in sorted(Path(folder).glob("*.jsonl")):
        with file.open(encoding="utf-8", errors="replace") as lines:
            found += read(lines)
    return found


def watch() -> None:
    """Watches this process, if it is a child of a script that is watched."""
    folder = os.environ.get(_FOLDER, "")
    if not os.path.isdir(folder):
        return
    path = os.path.join(folder, f"{os.getpid()}.jsonl")
    doctor = Doctor(getattr(sys, "orig_argv", sys.argv), path)
    atexit.register(doctor.stop)
    doctor.start()
