"""Reads XLA compilations from TensorFlow's log.

XLA compiles a function with `jit_compile=True` once per shape, in C++, where no Python runs.
TensorFlow logs each compilation to stderr if an environment variable asks for it. `XlaLog`
redirects stderr through a pipe, reads these lines, and removes them together with the lines that
the script's own log level would hide. It is opt-in, because a redirected stderr can change the
script's output.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable

OnCompiled = Callable[[str, int, float], None]
_LINE = re.compile(
    rb"device_compilation_profiler\.cc:\d+\] Compiled (\S+) (\d+) times, compile time: (\d+) us"
)
_LEVEL = re.compile(rb"^(?:([IWEF])\d{4} [\d:.]+ +\d+ |\d{4}-\d\d-\d\d [\d:.]+: ([IWEF]) )")
_BEFORE = b"WARNING: All log messages before absl"
_AFTER = b"To enable the following instructions"  # the second line of the CPU message


class XlaLog:
    """Reads the log. Create it before TensorFlow is imported.

    Args:
        on_compiled: Called per compilation: program name, its compilations so far, seconds.
    """

    def __init__(self, on_compiled: OnCompiled) -> None:
        self._on_compiled = on_compiled
        self._level = int(os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0") or 0)
        modules = os.environ.get("TF_CPP_VMODULE", "")
        ours = "device_compilation_profiler=1"
        os.environ["TF_CPP_VMODULE"] = f"{modules},{ours}" if modules else ours
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"
        self._stderr = os.dup(2)
        # Programs format their output differently for a pipe, so a terminal stays a terminal.
        self._read, write = os.openpty() if os.isatty(2) else os.pipe()
        os.dup2(write, 2)
        os.close(write)
        self._thread = threading.Thread(target=self._pump, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Restores stderr."""
        sys.stderr.flush()
        os.dup2(self._stderr, 2)  # closes the last write end, which ends the thread
        self._thread.join(2)

    def _pump(self) -> None:
        rest = b""
        while True:
            try:
                received = os.read(self._read, 65536)
            except OSError:  # the other end of a terminal is closed
                break
            if not received:
                break
            *lines, rest = (rest + received).split(b"\n")
            kept = b"".join(line + b"\n" for line in lines if self._is_kept(line))
            if rest and not _LEVEL.match(rest) and not _BEFORE.startswith(rest[: len(_BEFORE)]):
                kept, rest = kept + rest, b""  # print a progress bar at once
            os.write(self._stderr, kept)
        os.write(self._stderr, rest)

    def _is_kept(self, line: bytes) -> bool:
        found = _LINE.search(line)
        if found is not None:
            name, number, spent = found.groups()
            self._on_compiled(name.decode(), int(number), int(spent) / 1e6)
            return False
        level = _LEVEL.match(line)
        if level is not None:
            return "IWEF".index((level[1] or level[2]).decode()) >= self._level
        return not (self._level and line.startswith((_BEFORE, _AFTER)))
