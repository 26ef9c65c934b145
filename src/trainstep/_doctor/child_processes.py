"""Child processes of a script: each is watched, and all append to one log file.

A child finds the file in an environment variable and `boot/sitecustomize.py` on its path, which
Python runs first. A forked child keeps writing to the file of its parent.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

from trainstep._doctor.records import read
from trainstep._doctor.session import Doctor

_VARIABLE = "TRAINSTEP_DOCTOR"
_BOOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "boot")


def watch_children(path: str) -> None:
    """Sets the environment so that child processes append to `path`."""
    os.environ[_VARIABLE] = path
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = _BOOT if not before else os.pathsep.join([_BOOT, before])


def child_records(path: str) -> list[Any]:
    """The records that other processes wrote to the file."""
    with open(path, encoding="utf-8", errors="replace") as lines:
        return [record for record in read(lines) if record.process != os.getpid()]


def watch_this_process() -> None:
    """Watches this process, if it is a child of a watched script."""
    path = os.environ.get(_VARIABLE, "")
    if os.path.isfile(path):
        doctor = Doctor(getattr(sys, "orig_argv", sys.argv), path)
        atexit.register(doctor.stop)
        doctor.start()
