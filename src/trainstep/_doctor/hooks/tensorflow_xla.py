"""XLA under TensorFlow: a function with `jit_compile=True` is compiled for every shape.

A trace may serve many shapes, and a function that is not compiled by XLA may call one that is, as
those do that Keras makes. How many compilations there were is asked of TensorFlow's own counters
before and after a call. Where they cannot be read, the shapes of the arguments tell, as far as
they are seen: those of a batch that comes out of an iterator are not.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Callable
from time import perf_counter
from types import FrameType
from typing import Any

from trainstep._doctor.hooks.call_sites import keras_call, site
from trainstep._doctor.hooks.watcher import Watcher
from trainstep._doctor.hooks.xla_counters import Counter, counters
from trainstep._doctor.records import Cause, Trace

_UNSEEN = (
    "functions with jit_compile=True inside of others: XLA compiles them for every shape, "
    "unseen from Python here; --xla counts that"
)


class Programs:
    """What is known of the programs that XLA makes for a function, or for those that it calls."""

    def __init__(self, *, compiled: bool) -> None:
        self.compiled = compiled  # by XLA itself
        self.within = compiled  # or something inside of it
        self.inside: set[Programs] = set()  # compiled ones, that the trace under way has met
        self.due = 0  # traced, and not compiled yet
        self.before = (0, 0)  # the counters, when something was first seen inside of it
        self.trace: Trace | None = None  # the last
        self.seen: set[str] = set()  # the shapes that it was compiled for
        self.last = ""


class Xla:
    """Counts compilations that come without a trace."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self.logged = False  # whether they are read from TensorFlow's log
        self.named: dict[str, Trace] = {}  # the last trace of each name that TensorFlow gave
        self._counters: tuple[Counter, Counter] | None = None
        self._looked = False
        self._noted = 0  # how many compilations it is known what they were for
        self._lock = threading.Lock()

    def traced(self, trace: Trace, programs: Programs, outer: Programs) -> None:
        """A function was traced, perhaps while another was."""
        if outer is programs:
            outer.trace = trace
            outer.inside.clear()
        if programs.compiled and (outer is programs or not outer.compiled):
            outer.inside.add(programs)
            outer.due += _is_run(trace)

    def entered(self, programs: Programs, outer: Programs, trace: Trace) -> None:
        """A function was called while another is traced, perhaps without being traced itself."""
        if not programs.within or outer.compiled:
            return
        if not outer.within:
            outer.within = True
            if not self.logged and self._find() is None:
                self._watcher.remark(_UNSEEN)
            outer.before = self._read()
        if programs not in outer.inside:
            outer.inside.add(programs)
            outer.due += _is_run(trace)

    def call(self, programs: Programs, run: Callable[..., Any], fn: Any, args: Any, kw: Any) -> Any:
        """Runs a function in which XLA may compile something."""
        if self.logged:
            return run(fn, *args, **kw)
        found = self._counters or self._find()
        if found is None:
            return self._by_shapes(programs, functools.partial(run, fn, *args, **kw), (args, kw))
        number, microseconds = found
        before = number.read(), microseconds.read()
        result = run(fn, *args, **kw)
        if number.read() != before[0]:
            frame = sys._getframe(2)
            self._watcher.guarded(lambda: self._compiled(programs, before, (args, kw), frame))
        return result

    def called(self, programs: Programs, args: Any, frame: FrameType) -> None:
        """A function was traced and has run, and XLA turned out to be in it."""
        if not self.logged and self._find() is not None:
            before = programs.before
            self._watcher.guarded(lambda: self._compiled(programs, before, args, frame))

    def seconds(self) -> float:
        """What all compilations took until now, if it is known."""
        return self._read()[1] / 1e6

    def _read(self) -> tuple[int, int]:
        """How many compilations there were, and the microseconds that they took."""
        found = self._counters
        return (0, 0) if found is None else (found[0].read(), found[1].read())

    def _find(self) -> tuple[Counter, Counter] | None:
        if not self._looked:
            self._looked = True
            try:
                self._counters = counters(sys.modules["tensorflow.python.eager.monitoring"])
            except Exception as error:
                self._watcher.failed("the counters of XLA's compilations", error)
        return self._counters

    def _compiled(
        self, programs: Programs, before: tuple[int, int], args: Any, frame: FrameType
    ) -> None:
        """XLA has compiled something while a function ran, or may have."""
        now = self._read()
        with self._lock:  # threads may have compiled at the same time
            number = max(now[0] - max(before[0], self._noted), 0)
            self._noted = max(now[0], self._noted)
        each = (now[1] - before[1]) / max(now[0] - before[0], 1) / 1e6
        due = min(number, programs.due)
        programs.due -= due
        shapes = _shapes(args)
        for _ in range(number - due):
            self._note(programs, shapes, each, frame)
        programs.seen.add(shapes)
        programs.last = shapes

    def _by_shapes(self, programs: Programs, run: Callable[[], Any], args: Any) -> Any:
        """The same by the arguments: right if nothing else decides about a shape."""
        shapes = _shapes(args)
        if shapes in programs.seen or not programs.compiled:
            return run()
        began = perf_counter()
        result = run()
        seconds = perf_counter() - began
        if not programs.due:
            frame = sys._getframe(3)
            self._watcher.guarded(lambda: self._note(programs, shapes, seconds, frame))
        programs.due = 0
        programs.seen.add(shapes)
        programs.last = shapes
        return result

    def _note(self, programs: Programs, shapes: str, seconds: float, frame: FrameType) -> None:
        if programs.trace is None:  # one of ours
            return
        if shapes and programs.last and shapes not in programs.seen:
            text = f"arguments: {programs.last} -> {shapes}"
        elif shapes:
            text = f"arguments: {shapes} as before, but another size inside, or gradients"
        else:
            text = "another shape of a batch"
        self._record(programs.trace, text, seconds, frame)

    def log_says(self, name: str, number: int, seconds: float) -> None:
        """TensorFlow's log tells of a compilation, from another thread."""
        known = self.named.get(re.sub(r"^__inference_|_\d+$", "", name))
        if known is not None and number > 1:  # the first is part of the first run
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            self._record(known, "another shape of a batch", seconds, frame)

    def _record(self, known: Trace, text: str, seconds: float, frame: FrameType | None) -> None:
        trace = Trace(engine="tensorflow", what="compile", called=site(frame))
        trace.group, trace.function, trace.defined = known.group, known.function, known.defined
        called = keras_call(frame) if known.via else None
        trace.via = known.via if called is None else called.via
        trace.causes = [Cause("hidden", text)]
        trace.seconds["compile"] = round(seconds, 6)
        self._watcher.log.begin(trace)
        self._watcher.log.note(trace)


def _is_run(trace: Trace) -> bool:
    """Whether what is traced will be run: not if it creates variables, then it is traced anew."""
    return all(cause.kind != "variables" for cause in trace.causes)


def _shapes(value: Any) -> str:
    """The shapes of all arrays in a value."""
    if isinstance(value, (tuple, list)):
        return ", ".join(filter(None, map(_shapes, value)))
    if isinstance(value, dict):
        return _shapes(list(value.values()))
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return ""
    return f"{getattr(dtype, 'name', dtype)}[{','.join(map(str, shape))}]"
