"""Where in the user's own code something happened: file, line, text.

Frames that belong to trainstep, Keras, an engine or the standard library's plumbing are passed
over, so that a report names the line its reader can change.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Sequence
from types import FrameType, TracebackType

_ENGINES = {"jax", "jaxlib", "keras", "numpy", "optree", "tensorflow", "torch", "tree"}
_PLUMBING = {"concurrent", "contextlib", "functools", "importlib", "runpy", "threading"}
_LIBRARIES = {"trainstep", "_pytest", "pluggy", *_ENGINES, *_PLUMBING}


def is_users(frame: FrameType) -> bool:
    """Whether a frame belongs to the user's own code."""
    module = frame.f_globals.get("__name__", "")
    frozen = frame.f_code.co_filename.startswith("<frozen")
    return module.partition(".")[0] not in _LIBRARIES and not frozen


def _name(filename: str, line: int) -> str:
    """`train.py:41`: the path relative to here where it is below here, the bare name elsewhere."""
    relative = os.path.relpath(filename)
    return f"{os.path.basename(filename) if relative.startswith('..') else relative}:{line}"


def caller() -> str:
    """The user's line that is calling into trainstep now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame):
            return _name(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return "<unknown>"


def here() -> str:
    """The user's line that is calling into trainstep, and its text."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    if frame is None:
        return "<unknown>"
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{_name(file, line)}: `{linecache.getline(file, line).strip()}`"


def is_shown() -> bool:
    """Whether the user's line that is calling only shows something to a person, and now.

    What `trainstep.print` and `callback` are given is shown at every step, long after.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    ours = frame is not None and _module_of(frame.f_globals.get("print")) == "trainstep"
    text = here()
    if ours or ".print(" in text or "callback(" in text:
        return False
    return any(word in text for word in ("print(", "log", "warn", "raise "))


def _module_of(fn: object) -> str:
    return str(getattr(fn, "__module__", "")).partition(".")[0]


def raised_at(traceback: TracebackType | None) -> tuple[str, str]:
    """The user's innermost line in a traceback, and its text."""
    found: tuple[str, int] | None = None
    while traceback is not None:
        if is_users(traceback.tb_frame):
            found = (traceback.tb_frame.f_code.co_filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    if found is None:
        return "<unknown>", ""
    return _name(*found), linecache.getline(*found).strip()


def depth() -> int:
    """How many frames lie between the caller and the user's line, for `warnings.warn`."""
    frame: FrameType | None = sys._getframe(1)
    count = 1
    while frame is not None and not is_users(frame):
        frame, count = frame.f_back, count + 1
    return count


def of_error(error: BaseException, frames: Sequence[tuple[str, int]] = ()) -> str:
    """The user's line behind an error: in the tracebacks of its causes, or among known frames."""
    found: BaseException | None = error
    while found is not None:
        site, line = raised_at(found.__traceback__)
        if line:
            return f"{site}: `{line}`"
        found = found.__cause__ or found.__context__
    innermost = _innermost_of_keras(error)
    if innermost:
        return innermost
    for file, number in frames:
        if not _is_library(file):
            return f"{_name(file, number)}: `{linecache.getline(file, number).strip()}`"
    return ""


def _is_library(file: str) -> bool:
    parts = file.replace(os.sep, "/").split("/")
    return file.startswith("<") or any(part in _LIBRARIES for part in parts[:-1])


def _innermost_of_keras(error: BaseException) -> str:
    """Where Keras was, if nothing of the user's is known."""
    name, found = "", error.__cause__ or error.__context__
    while found is not None:
        traceback = found.__traceback__
        while traceback is not None:
            frame = traceback.tb_frame
            if str(frame.f_globals.get("__name__", "")).startswith("keras.src.layers"):
                name = f"{frame.f_globals['__name__']}: {frame.f_code.co_qualname}"
            traceback = traceback.tb_next
        found = found.__cause__ or found.__context__
    return name
