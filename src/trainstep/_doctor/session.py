"""doctor in a process: hooks in, hooks out, and a report of what happened between.

with trainstep.doctor() as found:
...
print(found)
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Sequence
from types import TracebackType

from trainstep._common import user_code
from trainstep._common.import_hooks import Patches
from trainstep._common.version import __version__
from trainstep._doctor import hide_frames
from trainstep._doctor.diagnosis import diagnose
from trainstep._doctor.hooks.jax import Jax
from trainstep._doctor.hooks.keras import Keras
from trainstep._doctor.hooks.tensorflow import TensorFlow
from trainstep._doctor.hooks.torch import Torch
from trainstep._doctor.hooks.trainstep import Ours
from trainstep._doctor.hooks.watcher import Watcher
from trainstep._doctor.hooks.xla_log import XlaLog
from trainstep._doctor.records import End, Log, Start
from trainstep._doctor.report import Report

_LIBRARIES = ("keras", "jax", "jaxlib", "tensorflow", "torch", "flax", "optax", "numpy")


class Doctor:
    """Watches the process that it is in.

    Args:
        command: What is run, for the report.
        path: A file that each record is written to as it is made.
        xla: Whether to read XLA's compilations in TensorFlow's log, which goes through a pipe.
    """

    def __init__(
        self, command: Sequence[str] = (), path: str | None = None, *, xla: bool = False
    ) -> None:
        self.log = Log(path)
        self._watcher = Watcher(self.log)
        self._patches = Patches(self._watcher.failed)
        self._keras = Keras(self._watcher)
        self._tensorflow = TensorFlow(self._watcher, self._keras)
        self._jax = Jax(self._watcher, self._keras)
        self._torch = Torch(self._watcher, self._keras)
        self._ours = Ours(self._watcher)
        self._command = list(command)
        self._xla = XlaLog(self._tensorflow.xla.logged) if xla else None
        self._tensorflow.xla.reads_log = xla
        self._running = False
        self.error = ""  # that the script ended in

    def start(self) -> Doctor:
        """Begins to watch."""
        self._running = True
        self.log.note(Start(command=self._command, versions=_system(), when=time.time()))
        hide_frames.install(self._patches)
        self._keras.install(self._patches)
        self._tensorflow.install(self._patches)
        self._jax.install(self._patches)
        self._torch.install(self._patches)
        self._ours.install(self._patches)
        return self

    def stop(self) -> None:
        """Looks around for a last time, and lets go of everything."""
        if not self._running:
            return
        self._running = False
        if self._xla is not None:
            self._xla.stop()
        self._patches.undo()
        self._watcher.active = False
        self._watcher.guarded(self._keras.eager.finish)
        self._watcher.guarded(self._tensorflow.finish)
        self._watcher.guarded(self._torch.finish)
        self._watcher.check_jax()
        self.log.note(End(versions=versions(), error=self.error))
        self.log.close()

    @property
    def report(self) -> Report:
        """What has happened so far."""
        return diagnose(self.log.records)

    def __enter__(self) -> Doctor:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.error = "" if error is None else f"{type(error).__name__}: {error}"
        self.stop()

    def __str__(self) -> str:
        from trainstep._doctor.show.text import text

        return text(self.report)

    def _repr_html_(self) -> str:
        from trainstep._doctor.show.page import notebook

        return notebook(self.report)


def doctor() -> Doctor:
    """Watches what is traced and compiled in a block, and tells why.

    Returns:
        What prints as a report, in a terminal and in a notebook; `report` has it as an object.

    Example:
        >>> import trainstep as ts
        >>> with ts.doctor() as found:
        ...     pass
        >>> found.report.findings
        []
    """
    # The command of a notebook's kernel is nobody's.
    return Doctor([] if user_code.shell() else sys.argv)


def versions() -> dict[str, str]:
    """The versions of the libraries that were imported."""
    loaded = {name: sys.modules.get(name) for name in _LIBRARIES}
    found = {name: str(getattr(m, "__version__", "?")) for name, m in loaded.items() if m}
    engine = getattr(getattr(sys.modules.get("keras"), "config", None), "backend", None)
    if engine is not None:
        found["keras engine"] = engine()
    return found


def _system() -> dict[str, str]:
    return {
        "trainstep": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors",
    }
