"""Locations in the user's own code: file, line, text.

Frames of trainstep, Keras, an engine or the standard library's plumbing are skipped, so that a
report names a line that its reader can change.
"""

from __future__ import annotations

import functools
import linecache
import os
import sys
import sysconfig
from collections.abc import Sequence
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any

_ENGINES = {"jax", "jaxlib", "keras", "numpy", "optree", "tensorflow", "torch", "tree"}
_PLUMBING = {"concurrent", "contextlib", "functools", "importlib", "runpy", "threading"}
_LIBRARIES = {"trainstep", "_pytest", "pluggy", *_ENGINES, *_PLUMBING}
_INSTALLED = ("site-packages", "dist-packages")
_STANDARD = [os.path.abspath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
# Lines of code generated from the user's code -> the user's own: (file, line) -> (file, line).
mapped: dict[tuple[str, int], tuple[str, int]] = {}
# Files whose frames lie between the user's code, as AutoGraph rewrites it, and its callees.
_BETWEEN = ("/tensorflow/python/autograph/", "/tensorflow/python/util/", "/trainstep/_doctor/")
_ROOTS = tuple(
    root + os.sep
    for root in (os.path.dirname(os.path.dirname(os.path.abspath(__file__))), *_STANDARD)
)


def is_outside(frame: FrameType) -> bool:
    """Whether a frame belongs neither to trainstep nor to Keras, an engine or their plumbing."""
    module = frame.f_globals.get("__name__", "")
    frozen = frame.f_code.co_filename.startswith("<frozen")
    return module.partition(".")[0] not in _LIBRARIES and not frozen


def is_users(frame: FrameType) -> bool:
    """Whether a frame belongs to the user's own code."""
    return is_outside(frame) and is_users_file(frame.f_code)


def is_users_file(code: CodeType) -> bool:
    """Whether a piece of code was written by the user, and not installed."""
    return not is_installed(code.co_filename)


def is_users_module(module: ModuleType) -> bool:
    """Whether a module is the user's; one without a file is a script or a notebook."""
    file = getattr(module, "__file__", None)
    root = module.__name__.partition(".")[0]
    if file is None:
        return root == "__main__"
    return root not in _LIBRARIES and not is_installed(file)


@functools.lru_cache(maxsize=4096)
def is_installed(file: str) -> bool:
    """Whether a file is part of Python, of an installed package or of trainstep."""
    if file.startswith("<"):  # "<stdin>" and the cells of a notebook are the user's
        return file.startswith(("<frozen", "<__array_function__", "<trainstep "))
    parts = file.replace(os.sep, "/").split("/")
    return any(name in parts for name in _INSTALLED) or os.path.abspath(file).startswith(_ROOTS)


def shell() -> Any:
    """IPython's shell; None outside of notebooks and IPython."""
    get = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if get is None else get()


def _cell(filename: str) -> str:
    """`Cell In[3]`, if a file is a cell of a notebook; else empty."""
    format_name: Any = getattr(getattr(shell(), "compile", None), "format_code_name", None)
    return " ".join((format_name and format_name(filename)) or ())


def name(filename: str, line: int) -> str:
    """`train.py:41`: a path relative to the working directory, or the bare name if outside it.

    A line of a notebook has the name that IPython's tracebacks give it: `Cell In[3], line 41`.
    """
    if cell := _cell(filename):
        return f"{cell}, line {line}"
    relative = os.path.relpath(filename)
    return f"{os.path.basename(filename) if relative.startswith('..') else relative}:{line}"


def where(frame: FrameType) -> tuple[str, int]:
    """The file and the line at which a frame is."""
    found = (frame.f_code.co_filename, frame.f_lineno)
    return mapped.get(found, found)


def calling(frame: FrameType | None) -> FrameType | None:
    """The caller's frame if it is the user's; None if a library made the call."""
    while frame is not None:
        file = frame.f_code.co_filename.replace(os.sep, "/")
        if not any(part in file for part in _BETWEEN):
            break
        frame = frame.f_back
    return frame if frame is not None and is_users(frame) else None


def nearest(frame: FrameType | None) -> FrameType | None:
    """The innermost user frame; if all code is installed, the innermost of no known library."""
    start = frame
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    if frame is not None:
        return frame
    while start is not None and not is_outside(start):
        start = start.f_back
    return start


def caller() -> str:
    """The user's line that called trainstep."""
    frame = nearest(sys._getframe(1))
    return "<unknown>" if frame is None else name(frame.f_code.co_filename, frame.f_lineno)


def here() -> str:
    """The user's line that called trainstep, with its text."""
    frame = nearest(sys._getframe(1))
    if frame is None:
        return "<unknown>"
    return with_text(frame.f_code.co_filename, frame.f_lineno)


def with_text(file: str, line: int) -> str:
    """`train.py:41`, followed by the text of that line if it is known."""
    text = linecache.getline(file, line).strip()
    return f"{name(file, line)}: `{text}`" if text else name(file, line)


def is_shown() -> bool:
    """Whether the user's current line only prints, logs, warns or raises, right now.

    `trainstep.print` and `callback` do not count: they run at every step, long after the trace.
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
    """The user's innermost line in a traceback, and its text, empty if unknown."""
    found: tuple[str, int] | None = None
    while traceback is not None:
        if is_users(traceback.tb_frame):
            found = (traceback.tb_frame.f_code.co_filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    if found is None:
        return "<unknown>", ""
    return name(*found), linecache.getline(*found).strip()


def depth() -> int:
    """The `stacklevel` with which `warnings.warn` in the caller names the user's line."""
    frame: FrameType | None = sys._getframe(1)
    count = 1
    while frame is not None and not is_users(frame):
        frame, count = frame.f_back, count + 1
    return count


def of_error(error: BaseException, frames: Sequence[tuple[str, int]] = ()) -> str:
    """The user's line behind an error, from the tracebacks of its causes or from `frames`."""
    found: BaseException | None = error
    while found is not None:
        site, line = raised_at(found.__traceback__)
        if line:
            return f"{site}: `{line}`"
        found = found.__cause__ or found.__context__
    innermost = _innermost_keras_layer(error)
    if innermost:
        return innermost
    for file, number in frames:
        if not _is_library(file):
            return with_text(file, number)
    return ""


def _is_library(file: str) -> bool:
    parts = file.replace(os.sep, "/").split("/")
    return file.startswith("<") or any(part in _LIBRARIES for part in parts[:-1])


def _innermost_keras_layer(error: BaseException) -> str:
    """The innermost method of a Keras layer in the tracebacks of an error's causes."""
    innermost, found = "", error.__cause__ or error.__context__
    while found is not None:
        traceback = found.__traceback__
        while traceback is not None:
            frame = traceback.tb_frame
            if str(frame.f_globals.get("__name__", "")).startswith("keras.src.layers"):
                innermost = f"{frame.f_globals['__name__']}: {frame.f_code.co_qualname}"
            traceback = traceback.tb_next
        found = found.__cause__ or found.__context__
    return innermost
