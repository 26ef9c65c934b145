"""Follows the traces of a process: which are open, what they do besides, what they depend on.

    hook --begin--> the trace is open: what it reaches is looked at, side effects are heard
         --end----> side effects and captured values are noted
         --check--> a captured value has changed since

Nothing here keeps a function, a model or a frame alive after a trace. An engine may find a program
again by the function that it was made of: one that was kept would bring back an old program.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

from trainstep._doctor.hooks.assignments import assigned
from trainstep._doctor.hooks.call_sites import at
from trainstep._doctor.records import NOWHERE, Happened, Log, Note, Site, Trace
from trainstep._explain.causes import Effect

if TYPE_CHECKING:
    from trainstep._surroundings.captures import Captures
    from trainstep._surroundings.reach import Reach
    from trainstep._surroundings.side_effects import Observer

Result = TypeVar("Result")
_SYMBOLIC = {"Tracer", "SymbolicTensor"}


class Open:
    """A trace that is under way.

    What looks around is imported with the first: it needs NumPy, and a script may have something to
    say before NumPy is imported.
    """

    def __init__(
        self, trace: Trace, fn: Any, look: Callable[[], Reach] | None, holder: Any = None
    ) -> None:
        self.trace = trace
        self.observer: Observer | None = None
        self.holder = weak(fn if holder is None else holder)
        self._fn, self._look = fn, look
        self._before: Reach | None = None

    def listen(self) -> None:
        """Looks around, and listens from now on."""
        if self._look is not None:
            from trainstep._surroundings.side_effects import Observer

            self._before = self._look()
            observer = Observer(self.trace.function, self._before, is_symbolic, raises=False)
            self.observer = observer.__enter__()

    def close(self) -> tuple[Observer | None, Captures | None, Any]:
        """Stops listening; lets go of everything."""
        observer, before = self.observer, self._before
        if observer is not None:
            observer.__exit__()
        from trainstep._surroundings.reach import taken

        captures = None
        if before is not None and self._look is not None and not self.trace.failed:
            captures = taken(before, self._look())
            captures.unwatched.clear()
        fn = self._fn
        self.observer = self._before = self._fn = self._look = None
        return observer, captures, fn


class Kept:
    """The values around a program, with a weak hold on the function whose closure has some."""

    def __init__(self, trace: Trace, captures: Captures, fn: Any, holder: Any) -> None:
        self.trace, self.captures = trace, captures
        self.over = False  # whether something is gone, and the program with it
        self._fn, self._holder = weak(fn), holder

    def holds(self) -> bool:
        """Whether all values are as they were, or nobody can tell any more."""
        cells = None if self.over else self.cells()
        return cells is None or self.captures.holds(cells)

    def cells(self) -> Any:
        """The closure of the function, as it is now; None if the function is gone."""
        fn = self._fn()
        return None if fn is None or self._holder() is None else closure(fn)


class Watcher:
    """Watches a process.

    Args:
        log: Where everything is noted.
    """

    def __init__(self, log: Log) -> None:
        self.log = log
        self._kept: dict[str, Kept] = {}  # of the last trace of each function
        self._local = threading.local()
        self._serials: dict[str, list[weakref.ref[Any]]] = {}
        self._remarks: set[str] = set()
        self.active = True

    def open_traces(self) -> list[Open]:
        """The traces that are open in this thread, the outermost first."""
        stack: list[Open] | None = getattr(self._local, "stack", None)
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
    ) -> Open:
        """A trace begins.

        Args:
            trace: What is known of it.
            fn: The user's function, if side effects and captured values matter to it.
            values: Its arguments.
            uses: Objects that run user code inside: models, losses.
            holder: What lives as long as the program; `fn` if it is not said.
        """
        stack = self.open_traces()
        look = None if fn is None else functools.partial(_reached, fn, values, uses)
        opened = Open(trace, fn, None if stack else look, holder)
        if stack:
            trace.inside = stack[0].trace.number
        self.log.begin(trace)
        stack.append(opened)
        self.guarded(opened.listen)
        return opened

    def end(self, opened: Open) -> Kept | None:
        """A trace has ended: what it did, and the values that its program holds."""
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
        kept = Kept(opened.trace, captures, fn, opened.holder)
        self._kept[opened.trace.group] = kept
        return kept

    def drop(self, opened: Open) -> None:
        """A trace turns out to be none."""
        stack = self.open_traces()
        if opened in stack:
            del stack[stack.index(opened) :]
            self.guarded(opened.close)

    def _effects(self, trace: Trace, observer: Observer) -> None:
        for effect in observer.found():
            self.log.note(side_effect(trace, effect))

    def check(self, kept: Kept, noticed: Callable[[], Site] = lambda: NOWHERE) -> None:
        """Notes the values of a program that have changed since it was traced."""
        from trainstep._surroundings.patched_builtins import heard

        if heard or kept.holds():  # while somebody traces, names lead elsewhere
            return
        cells = kept.cells()
        changes = list(kept.captures.changes(cells))
        # A function whose default has changed is said to have changed, too.
        changes = [each for each in changes if each[1] != each[2]] or changes
        kept.over = any(now == "gone" for _, _, now in changes)
        kept.captures.accept(cells)
        for label, before, now in [] if kept.over else changes:
            name, (file, line) = label.partition(", read at ")[0], kept.captures.sites[label]
            self.log.note(
                Happened(
                    kind="stale",
                    engine=kept.trace.engine,
                    group=kept.trace.group,
                    function=kept.trace.function,
                    site=at(file, line) if line else kept.trace.defined,
                    what=name,
                    before=before,
                    now=now,
                    noticed=noticed(),
                    value=assigned(name, file) if line else "",
                )
            )

    def is_outdated(self, group: str, fn: Any) -> bool:
        """Whether values have changed since the last trace of a function that is traced now."""
        kept = self._kept.get(group)
        changes = () if kept is None else kept.captures.changes(closure(fn))
        return any(now != "gone" for _, _, now in changes)

    def check_group(self, group: str, noticed: Callable[[], Site]) -> None:
        """The same for the last program of a function, which is being called."""
        kept = self._kept.get(group)
        if kept is not None:
            self.guarded(lambda: self.check(kept, noticed))

    def check_jax(self, but: str = "") -> None:
        """The same for all functions of JAX's that nobody sees being called.

        Those of TensorFlow and Keras are looked at when they are called. `but` is left out: a
        function that is being traced has new values for it, and may never need the old program.
        """
        for group, kept in list(self._kept.items()):
            if kept.trace.engine == "jax" and group != but and not group.startswith("keras:"):
                self.guarded(functools.partial(self.check, kept))

    def serial(self, value: Any, kind: str) -> int:
        """A number for an object, from 1 on, for as long as it lives."""
        known = self._serials.setdefault(kind, [])
        for number, ref in enumerate(known, 1):
            if ref() is value:
                return number
        known.append(weak(value))
        return len(known)

    def guarded(self, run: Callable[[], Result]) -> Result | None:
        """Runs something of doctor's; what goes wrong there is noted, and the script goes on."""
        try:
            return run()
        except Exception as error:
            self.failed("doctor", error)
            return None

    def failed(self, where: str, error: Exception) -> None:
        """Notes something of doctor's that does not work, once."""
        self.remark(f"{where}: {type(error).__name__}: {error}")

    def remark(self, text: str) -> None:
        """Notes something that doctor cannot see, once."""
        if text not in self._remarks:
            self._remarks.add(text)
            self.log.note(Note(text=text))


def _reached(fn: Any, values: Sequence[Any], uses: Callable[[], Sequence[Any]]) -> Reach:
    from trainstep._surroundings.reach import reached

    return reached(fn, values, uses)


def side_effect(trace: Trace, effect: Effect) -> Happened:
    """A side effect as a record."""
    return Happened(
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
    """Whether a value is a tensor of a trace, which has no numbers."""
    return any(kind.__name__ in _SYMBOLIC for kind in type(value).__mro__)


def weak(value: Any) -> Any:
    """A weak reference; to nothing, if there can be none."""
    try:
        return weakref.WeakMethod(value) if isinstance(value, MethodType) else weakref.ref(value)
    except TypeError:
        return _nothing


def _nothing() -> None:
    return None
