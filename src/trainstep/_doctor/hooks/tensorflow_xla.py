"""XLA compilations under TensorFlow: a function with `jit_compile=True` is compiled once per shape.

One trace may serve several shapes, so XLA compiles without a trace, in C++, where Python sees
nothing. Two sources remain:

    the arguments of a direct call  a new shape is a new compilation
    TensorFlow's log (`--xla`)      every compilation, also inside other functions

Without the log, a compiled function inside another one is counted only if its trace serves a
single shape. Otherwise the report names the outer function as not counted.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from time import perf_counter
from types import FrameType
from typing import Any

from trainstep._doctor.hooks.call_sites import current_keras_call, site
from trainstep._doctor.hooks.watcher import Watcher
from trainstep._doctor.records import Cause, Trace

_NOT_COUNTED = (
    "XLA compilations inside `{}` are not counted: it calls a function with jit_compile=True, "
    "which XLA compiles once per batch shape; `trainstep doctor --xla` counts them"
)


class XlaPrograms:
    """The XLA programs of one function object."""

    def __init__(self, *, jit_compile: bool) -> None:
        self.jit_compile = jit_compile
        self.serves_several_shapes = False  # one trace of it, that is
        self.contains_uncounted = False
        self.trace: Trace | None = None  # the last one
        self.is_due = False  # whether the next compilation belongs to the last trace
        self.compiled_for: set[Any] = set()
        self.last_arguments = ""


class XlaCompilations:
    """Counts XLA compilations that happen without a trace."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self.reads_log = False
        self.traces_by_name: dict[str, Trace] = {}  # the last trace of each TensorFlow name

    def traced(self, trace: Trace, programs: XlaPrograms, program: Any) -> None:
        """Records that a function was traced, on its own or inside another one."""
        programs.trace, programs.is_due = trace, True
        if any(not each.shape.is_fully_defined() for each in program.inputs):
            programs.serves_several_shapes = True

    def called_inside(self, inner: XlaPrograms, outer: XlaPrograms, outer_name: str) -> None:
        """Records that a function was called while another one is traced."""
        # XLA compiles an outer function with jit_compile=True as a whole, inner ones included.
        if outer.jit_compile or outer.contains_uncounted:
            return
        several = inner.jit_compile and inner.serves_several_shapes
        if several or inner.contains_uncounted:
            outer.contains_uncounted = True
            if not self.reads_log:
                self._watcher.note_once(_NOT_COUNTED.format(outer_name))

    def call(
        self, programs: XlaPrograms, run: Callable[..., Any], fn: Any, args: Any, kwargs: Any
    ) -> Any:
        """Calls a function with `jit_compile=True` and counts a compilation for new shapes."""
        if self.reads_log:
            return run(fn, *args, **kwargs)
        key = _key((args, kwargs))
        if key in programs.compiled_for:
            result = run(fn, *args, **kwargs)
            programs.is_due = False  # if it was traced again, for a reason other than a shape
            return result
        began = perf_counter()
        result = run(fn, *args, **kwargs)
        seconds, arguments = perf_counter() - began, _described((args, kwargs))
        if not programs.is_due and programs.trace is not None:  # trainstep's own have no trace
            known, before, frame = programs.trace, programs.last_arguments, sys._getframe(2)
            text = f"arguments: {before} -> {arguments}" if before else f"arguments: {arguments}"
            # The call compiled and ran; Python sees only the sum of the two.
            spent = {"first_run": round(seconds, 6)}
            self._watcher.guarded(lambda: self._record(known, text, spent, frame))
        programs.is_due = False
        programs.compiled_for.add(key)
        programs.last_arguments = arguments
        return result

    def logged(self, name: str, number: int, seconds: float) -> None:
        """Records a compilation that TensorFlow logged; called from the thread that reads it."""
        known = self.traces_by_name.get(re.sub(r"^__inference_|_\d+$", "", name))
        if known is not None and number > 1:  # the first is part of the first run
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            spent = {"compile": round(seconds, 6)}
            self._record(known, "another shape of a batch", spent, frame)

    def _record(
        self, known: Trace, text: str, seconds: dict[str, float], frame: FrameType | None
    ) -> None:
        trace = Trace(engine="tensorflow", what="compile", called=site(frame), seconds=seconds)
        trace.group, trace.function, trace.defined = known.group, known.function, known.defined
        called = current_keras_call(frame) if known.via else None
        trace.via = known.via if called is None else called.via
        trace.causes = [Cause("hidden", text)]
        self._watcher.log.begin(trace)
        self._watcher.log.note(trace)


def _key(value: Any) -> Any:
    """The shapes, dtypes and plain Python values in a value; fast, as every call needs it."""
    kind = type(value)
    if kind is tuple or kind is list:
        return tuple([_key(each) for each in value])
    if kind is dict:
        return tuple([_key(each) for each in value.values()]) if value else ()
    if hasattr(kind, "_shape_tuple"):  # an eager tensor
        return value._shape_tuple(), value.dtype
    return value if isinstance(value, (bool, int, float, str)) else _described(value)


def _described(value: Any) -> str:
    """The shapes of all arrays in a value, and its plain Python values."""
    if isinstance(value, (tuple, list)):
        return ", ".join(filter(None, map(_described, value)))
    if isinstance(value, dict):
        return _described(list(value.values()))
    if isinstance(value, (bool, int, float, str)):
        return repr(value)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return ""
    return f"{getattr(dtype, 'name', dtype)}[{','.join(map(str, shape))}]"
