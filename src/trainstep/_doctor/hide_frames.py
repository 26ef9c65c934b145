"""Hides doctor's frames from the script.

Each hook is a Python function and so has a frame. Tracebacks (printed, logged, or of threads),
`traceback.print_stack()` and `inspect.stack()` omit these frames and those of the command that runs
the script.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from trainstep._common.import_hooks import Patches
from trainstep._common.run_script import is_ours, is_runner, without_ours


def install(patches: Patches) -> None:
    """Replaces the functions with which Python shows a stack."""
    hooks: dict[str, Callable[[Patches, Any], None]] = {
        traceback.__name__: _tracebacks,
        inspect.__name__: _inspected,
        threading.__name__: _threads,
    }
    for module, hook in hooks.items():
        patches.on_import(module, functools.partial(hook, patches))


def _tracebacks(patches: Patches, module: Any) -> None:
    def walked(original: Any) -> Any:
        @functools.wraps(original)
        def walk(*args: Any) -> Iterator[Any]:
            return (each for each in original(*args) if not is_ours(each[0]))

        return walk

    patches.replace(module, "walk_tb", walked)
    patches.replace(module, "_walk_tb_with_full_positions", walked)
    patches.replace(module, "walk_stack", lambda original: functools.wraps(original)(_walk_stack))


def _walk_stack(f: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    if f is None:  # the caller of `StackSummary.extract(walk_stack(None))`
        f = sys._getframe(4)
    for frame in _outwards(f):
        yield frame, frame.f_lineno


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of the script, innermost first."""
    while frame is not None and not is_runner(frame):
        if not is_ours(frame):
            yield frame
        frame = frame.f_back


def _inspected(patches: Patches, module: Any) -> None:
    def outer(original: Any) -> Any:
        @functools.wraps(original)
        def getouterframes(frame: FrameType, context: int = 1) -> list[Any]:
            kept = set(map(id, _outwards(frame)))
            return [each for each in original(frame, context) if id(each.frame) in kept]

        return getouterframes

    def inner(original: Any) -> Any:
        @functools.wraps(original)
        def getinnerframes(tb: Any, context: int = 1) -> list[Any]:
            return [each for each in original(tb, context) if not is_ours(each.frame)]

        return getinnerframes

    patches.replace(module, "getouterframes", outer)
    patches.replace(module, "getinnerframes", inner)


def _threads(patches: Patches, module: Any) -> None:
    def make(original: Any) -> Any:
        @functools.wraps(original)
        def excepthook(args: Any) -> None:
            kind, error, found, thread = args
            if error is not None:
                without_ours(error)
                found = error.__traceback__
            original(type(args)((kind, error, found, thread)))

        return excepthook

    patches.replace(module, "excepthook", make)
