"""Processes that a script starts: each is watched, and all write into one file.

A child finds the file in its environment, and `boot/sitecustomize.py` on its path, which Python
runs before anything else. A child that is forked writes on where its parent did.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

from trainstep._doctor.records import read
from trainstep._doctor.session import Doctor

_FILE = "TRAINSTEP_DOCTOR"
_BOOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "boot")


def prepare(path: str) -> None:
    """Has children find the file."""
    os.environ[_FILE] = path
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = _BOOT if not before else os.pathsep.join([_BOOT, before])


def records(path: str) -> list[Any]:
    """What other processes than this one have written."""
    with open(path, encoding="utf-8", errors="replace") as lines:
        return [record for record in read(lines) if record.process != os.getpid()]


def watch() -> None:
    """Watches this process, if it is a child of a script that is watched."""
    path = os.environ.get(_FILE, "")
    if os.path.isfile(path):
        doctor = Doctor(getattr(sys, "orig_argv", sys.argv), path)
        atexit.register(doctor.stop)
        doctor.start()
