"""Runs a script or a module as Python itself would."""

from __future__ import annotations

import builtins
import importlib.machinery
import os
import runpy
import signal
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_RUNNER = os.path.abspath(__file__)
# Files whose frames lie between a script and Python, or between a script and its libraries.
_OURS = tuple(
    _HERE + name
    for name in (
        "_common/run_script",
        "__main__",
        "_doctor",
        "_common/import_hooks",
        "_surroundings/patched_builtins",
        "_surroundings/side_effects",
        "_surroundings/reach",
    )
)


def run_script(script: str, args: Sequence[str]) -> None:
    """Runs a file as `__main__`."""
    path = os.path.join(os.getcwd(), script)
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    main = types.ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __builtins__=builtins, __cached__=None, __loader__=loader)
    if sys.version_info < (3, 14):  # later, a module computes its annotations
        vars(main)["__annotations__"] = {}
    sys.modules["__main__"] = main
    sys.argv[:] = [script, *args]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    exec(code, vars(main))


def run_module(name: str, args: Sequence[str]) -> None:
    """Runs a module as `python -m` does."""
    sys.argv[:] = [name, *args]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def exit_code(error: BaseException | None) -> int:
    """Prints an error as Python would, and returns Python's exit code for it."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    without_ours(error)
    sys.excepthook(type(error), error, error.__traceback__)
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def is_ours(frame: FrameType) -> bool:
    """Whether a frame exists only because trainstep runs or observes the script."""
    return frame.f_code.co_filename.startswith(_OURS)


def is_runner(frame: FrameType) -> bool:
    """Whether a frame is the one that runs the script."""
    return frame.f_code.co_filename == _RUNNER


def without_ours(error: BaseException) -> None:
    """Removes such frames from the tracebacks of an error and of its causes."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        found = todo.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        found.__traceback__ = _cut(found.__traceback__)
        todo += [found.__cause__, found.__context__]


def _cut(traceback: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    while traceback is not None:
        if not is_ours(traceback.tb_frame):
            kept.append(traceback)
        traceback = traceback.tb_next
    for one, after in zip(kept, [*kept[1:], None], strict=True):
        one.tb_next = after
    return kept[0] if kept else None
