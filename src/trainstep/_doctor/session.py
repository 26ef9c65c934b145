"""doctor inside a process: installs the hooks, removes them, and returns the report.

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
from trainstep._doctor.hooks.trainstep import TrainstepFunctions
from trainstep._doctor.hooks.watcher import Watcher
from trainstep._doctor.hooks.xla_log import XlaLog
from trainstep._doctor.records import End, Log, Start
from trainstep._doctor.report import Report

_LIBRARIES = ("keras", "jax", "jaxlib", "tensorflow", "torch", "flax", "optax", "numpy")


class Doctor:
    """Watches the current process.

    Args:
        command: The command line, shown in the report.
        path: A file to which each record is appended at once.
        xla: Whether to count XLA compilations in TensorFlow's log, which redirects stderr.
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
        self._trainstep = TrainstepFunctions(self._watcher)
        self._command = list(command)
        self._xla = XlaLog(self._tensorflow.xla.logged) if xla else None
        self._tensorflow.xla.reads_log = xla
        self._running = False
        self.error = ""  # the exception that ended the script

    def start(self) -> Doctor:
        """Installs the hooks."""
        self._running = True
        self.log.note(Start(command=self._command, versions=_system(), when=time.time()))
        hide_frames.install(self._patches)
        self._keras.install(self._patches)
        self._tensorflow.install(self._patches)
        self._jax.install(self._patches)
        self._torch.install(self._patches)
        self._trainstep.install(self._patches)
        return self

    def stop(self) -> None:
        """Removes the hooks, checks captured values a last time, and closes the log."""
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
        """The report up to now."""
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
    """Reports every trace and compilation in a block, with its cause.

    Returns:
        A context manager that prints as the report, in a terminal and in a notebook; its `report`
        is the same as an object.

    Example:
        >>> import trainstep as ts
        >>> with ts.doctor() as found:
        ...     pass
        >>> found.report.findings
        []
    """
    # A notebook's command line is that of its kernel, which the user never wrote.
    return Doctor([] if user_code.shell() else sys.argv)


def versions() -> dict[str, str]:
    """The versions of the imported libraries."""
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
