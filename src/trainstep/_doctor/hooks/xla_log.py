"""XLA's compilations under TensorFlow, read from TensorFlow's own log.

A program with `jit_compile=True` is compiled once for every shape, in C++, where no Python is run.
TensorFlow can be told to log each compilation. The log goes to the process's error output: that is
led through here, where those lines are taken out, and others that would not have been printed.
Only on request: the script's error output is not what it would be.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable

Compiled = Callable[[str, int, float], None]
_LINE = re.compile(
    rb"device_compilation_profiler\.cc:\d+\] Compiled (\S+) (\d+) times, compile time: (\d+) us"
)
_LEVEL = re.compile(rb"^(?:([IWEF])\d{4} [\d:.]+ +\d+ |\d{4}-\d\d-\d\d [\d:.]+: ([IWEF]) )")
_BEFORE = b"WARNING: All log messages before absl"
_AFTER = b"To enable the following instructions"  # the second line of a message


class XlaLog:
    """Reads the log. To be started before TensorFlow is imported.

    Args:
        compiled: Told of each compilation: the program's name, how many it has now, the seconds.
    """

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self._level = int(os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0") or 0)
        modules = os.environ.get("TF_CPP_VMODULE", "")
        ours = "device_compilation_profiler=1"
        os.environ["TF_CPP_VMODULE"] = f"{modules},{ours}" if modules else ours
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"
        self._real = os.dup(2)
        # A terminal stays one, so that nobody writes other than before.
        self._read, write = os.openpty() if os.isatty(2) else os.pipe()
        os.dup2(write, 2)
        os.close(write)
        self._thread = threading.Thread(target=self._pump, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Gives the process its error output back."""
        sys.stderr.flush()
        os.dup2(self._real, 2)  # nobody writes any more, so that the reading ends
        self._thread.join(2)

    def _pump(self) -> None:
        rest = b""
        while True:
            try:
                came = os.read(self._read, 65536)
            except OSError:  # the other end of a terminal is closed
                break
            if not came:
                break
            *lines, rest = (rest + came).split(b"\n")
            kept = b"".join(line + b"\n" for line in lines if self._keeps(line))
            if rest and not _LEVEL.match(rest) and not _BEFORE.startswith(rest[: len(_BEFORE)]):
                kept, rest = kept + rest, b""  # a progress bar is not held back
            os.write(self._real, kept)
        os.write(self._real, rest)

    def _keeps(self, line: bytes) -> bool:
        found = _LINE.search(line)
        if found is not None:
            name, number, spent = found.groups()
            self._compiled(name.decode(), int(number), int(spent) / 1e6)
            return False
        level = _LEVEL.match(line)
        if level is not None:
            return "IWEF".index((level[1] or level[2]).decode()) >= self._level
        return not (self._level and line.startswith((_BEFORE, _AFTER)))
