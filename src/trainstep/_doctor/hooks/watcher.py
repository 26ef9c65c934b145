"""Follows the open traces of a process, their side effects and their captured values.

    hook --begin--> the trace is open: captured values are read, side effects are observed
         --end----> side effects and captured values are recorded
         --check--> a captured value has changed since

Nothing here keeps a function, model or frame alive after a trace. Engines look programs up by
function, so a function that doctor kept alive would bring back an old program.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

from trainstep._doctor.hooks.assignments import assignment_lines
from trainstep._doctor.hooks.call_sites import at
from trainstep._doctor.records import NOWHERE, Incident, Log, Note, Site, Trace
from trainstep._explain.causes import Effect

if TYPE_CHECKING:
    from trainstep._surroundings.captures import Captures
    from trainstep._surroundings.reach import Reach
    from trainstep._surroundings.side_effects import Observer

Result = TypeVar("Result")
_SYMBOLIC = {"Tracer", "SymbolicTensor"}


class OpenTrace:
    """A trace in progress."""

    def __init__(
        self, trace: Trace, fn: Any, look: Callable[[], Reach] | None, holder: Any = None
    ) -> None:
        self.trace = trace
        self.observer: Observer | None = None
        self.holder = weak(fn if holder is None else holder)
        self._fn, self._look = fn, look
        self._before: Reach | None = None

    def observe(self) -> None:
        """Reads the captured values and starts to observe side effects."""
        if self._look is not None:
            # Imported only now: it needs NumPy, and a script may set options before NumPy loads.
            from trainstep._surroundings.side_effects import Observer

            self._before = self._look()
            observer = Observer(self.trace.function, self._before, is_symbolic, raises=False)
            self.observer = observer.__enter__()

    def close(self) -> tuple[Observer | None, Captures | None, Any]:
        """Stops observing and drops all references."""
        observer, before = self.observer, self._before
        if observer is not None:
            observer.__exit__()
        from trainstep._surroundings.reach import captured_values

        captures = None
        if before is not None and self._look is not None and not self.trace.failed:
            captures = captured_values(before, self._look())
            captures.unwatched.clear()
        fn = self._fn
        self.observer = self._before = self._fn = self._look = None
        return observer, captures, fn


class CapturedValues:
    """The captured values of a program, with a weak reference to its function."""

    def __init__(self, trace: Trace, captures: Captures, fn: Any, holder: Any) -> None:
        self.trace, self.captures = trace, captures
        self.is_dead = False  # whether a captured object was deleted, and the program with it
        self._fn, self._holder = weak(fn), holder

    def holds(self) -> bool:
        """Whether no value has changed, as far as that can still be checked."""
        cells = None if self.is_dead else self.cells()
        return cells is None or self.captures.holds(cells)

    def cells(self) -> Any:
        """The current closure of the function; None if the function was deleted."""
        fn = self._fn()
        return None if fn is None or self._holder() is None else closure(fn)


class Watcher:
    """Watches the traces of a process.

    Args:
        log: The log for all records.
    """

    def __init__(self, log: Log) -> None:
        self.log = log
        self._kept: dict[str, CapturedValues] = {}  # by group: those of the last trace
        self._local = threading.local()
        self._serials: dict[str, list[weakref.ref[Any]]] = {}
        self._remarks: set[str] = set()
        self.active = True

    def open_traces(self) -> list[OpenTrace]:
        """The open traces of this thread, outermost first."""
        stack: list[OpenTrace] | None = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack

    def begin(
        self,
        trace: Trace,
        fn: Any = None,
        values: Sequence[Any] = (),
        uses: Callable[[], Sequence[Any]] = list,
        holder: Any = None,
    ) -> OpenTrace:
        """Opens a trace.

        Args:
            trace: Its record, as far as known.
            fn: The user's function, to observe side effects and captured values; None: neither.
            values: Its arguments.
            uses: Returns further objects with user code: models, losses.
            holder: The object whose lifetime is that of the program; `fn` by default.
        """
        stack = self.open_traces()
        look = None if fn is None else functools.partial(_reached, fn, values, uses)
        opened = OpenTrace(trace, fn, None if stack else look, holder)
        if stack:
            trace.inside = stack[0].trace.number
        self.log.begin(trace)
        stack.append(opened)
        self.guarded(opened.observe)
        return opened

    def end(self, opened: OpenTrace) -> CapturedValues | None:
        """Closes a trace, records its side effects, and returns its captured values."""
        stack = self.open_traces()
        if opened not in stack:
            return None
        del stack[stack.index(opened) :]
        closed = self.guarded(opened.close)
        self.log.note(opened.trace)
        if closed is None:
            return None
        observer, captures, fn = closed
        if observer is not None:
            self.guarded(lambda: self._effects(opened.trace, observer))
        if captures is None or not captures.source.text:
            return None
        kept = CapturedValues(opened.trace, captures, fn, opened.holder)
        self._kept[opened.trace.group] = kept
        return kept

    def drop(self, opened: OpenTrace) -> None:
        """Discards a trace that compiled nothing."""
        stack = self.open_traces()
        if opened in stack:
            del stack[stack.index(opened) :]
            self.guarded(opened.close)

    def _effects(self, trace: Trace, observer: Observer) -> None:
        for effect in observer.found():
            self.log.note(side_effect(trace, effect))

    def check(self, kept: CapturedValues, noticed: Callable[[], Site] = lambda: NOWHERE) -> None:
        """Records the captured values that have changed since the trace."""
        from trainstep._surroundings.patched_builtins import active_listeners

        if active_listeners or kept.holds():  # during a trace, stand-ins replace some of the values
            return
        cells = kept.cells()
        changes = list(kept.captures.changes(cells))
        # A changed default also reports its function as changed, with equal texts: drop that one.
        changes = [each for each in changes if each[1] != each[2]] or changes
        kept.is_dead = any(now == "gone" for _, _, now in changes)
        kept.captures.accept(cells)
        for label, before, now in [] if kept.is_dead else changes:
            name, (file, line) = label.partition(", read at ")[0], kept.captures.sites[label]
            self.log.note(
                Incident(
                    kind="stale",
                    engine=kept.trace.engine,
                    group=kept.trace.group,
                    function=kept.trace.function,
                    site=at(file, line) if line else kept.trace.defined,
                    what=name,
                    before=before,
                    now=now,
                    noticed=noticed(),
                    value=assignment_lines(name, file) if line else "",
                )
            )

    def is_outdated(self, group: str, fn: Any) -> bool:
        """Whether captured values of `fn` have changed since its last trace."""
        kept = self._kept.get(group)
        changes = () if kept is None else kept.captures.changes(closure(fn))
        return any(now != "gone" for _, _, now in changes)

    def check_group(self, group: str, noticed: Callable[[], Site]) -> None:
        """Checks the last program of a function that is being called."""
        kept = self._kept.get(group)
        if kept is not None:
            self.guarded(lambda: self.check(kept, noticed))

    def check_jax(self, but: str = "") -> None:
        """Checks all JAX functions, whose calls run no Python.

        TensorFlow and Keras functions are checked at each call. The group `but` is skipped: a
        function that is being traced captures new values and may never use the old program.
        """
        for group, kept in list(self._kept.items()):
            if kept.trace.engine == "jax" and group != but and not group.startswith("keras:"):
                self.guarded(functools.partial(self.check, kept))

    def serial_number(self, value: Any, kind: str) -> int:
        """The serial number of a live object, counted from 1 per kind."""
        known = self._serials.setdefault(kind, [])
        for number, ref in enumerate(known, 1):
            if ref() is value:
                return number
        known.append(weak(value))
        return len(known)

    def guarded(self, run: Callable[[], Result]) -> Result | None:
        """Runs code of doctor's; records an exception instead of raising it into the script."""
        try:
            return run()
        except Exception as error:
            self.failed("doctor", error)
            return None

    def failed(self, where: str, error: Exception) -> None:
        """Records, once, that a part of doctor failed."""
        self.note_once(f"{where}: {type(error).__name__}: {error}")

    def note_once(self, text: str) -> None:
        """Records a limit of the report, once."""
        if text not in self._remarks:
            self._remarks.add(text)
            self.log.note(Note(text=text))


def _reached(fn: Any, values: Sequence[Any], uses: Callable[[], Sequence[Any]]) -> Reach:
    from trainstep._surroundings.reach import reached

    return reached(fn, values, uses)


def side_effect(trace: Trace, effect: Effect) -> Incident:
    """The record of a side effect."""
    return Incident(
        kind="leaks" if effect.leaks else "side-effects",
        engine=trace.engine,
        group=trace.group,
        function=trace.function,
        site=at(effect.file, effect.line),
        what=effect.what,
        detail=effect.kind,
        value=effect.value,
    )


def closure(fn: Any) -> Any:
    """The closure of a function or a method."""
    return getattr(getattr(fn, "__func__", fn), "__closure__", None) or ()


def is_symbolic(value: Any) -> bool:
    """Whether a value is a symbolic tensor, which has no numbers."""
    return any(kind.__name__ in _SYMBOLIC for kind in type(value).__mro__)


def weak(value: Any) -> Any:
    """A weak reference; one to None if the value supports none."""
    try:
        return weakref.WeakMethod(value) if isinstance(value, MethodType) else weakref.ref(value)
    except TypeError:
        return _nothing


def _nothing() -> None:
    return None
