"""The ledger: every trace and compilation, with its time, its call site and its reason.

There is one `TraceEvent` per trace and per further program of a trace, and one `Ledger` per
function. `ledger()` shows all functions of the process; it refers to them weakly, so the entries of
a function disappear with it.
"""

from __future__ import annotations

import io
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Protocol, overload

from trainstep._explain.causes import Effect
from trainstep._explain.signature import Signature

log = logging.getLogger("trainstep")


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One entry: a trace of a function, or a later event of a trace.

    Attributes:
        index: 1 for the function's first entry.
        function: The function's name.
        signature: The signature that the program was compiled for.
        changes: The differences from the nearest earlier signature, part by part.
        nearest: The index of that earlier trace; None for the first.
        site: The user's file and line of the call.
        trace_seconds: Time spent running the user's Python and recording it.
        compile_seconds: Time spent in the engine's compiler.
        reads: Paths of the variables that the program reads.
        writes: Paths of the variables that it writes.
        compiler: The engine's compiler that built the program.
        advice: One line on how to avoid the trace.
        kind: `"trace"`: the user's Python ran. `"bucket"`: a trace with dynamic sizes was compiled
            for some sizes. `"refused"`: a trace cannot be used for other sizes. `"evicted"`: a
            program was dropped from the cache.
        when: The time, in seconds since the epoch.
        effects: The step's Python side effects during tracing, each with its line.
        from_disk: Whether the program was loaded from the engine's disk cache.
        kinds: The kind of each change, a key of `causes.CURES`.
    """

    index: int
    function: str
    signature: str
    changes: tuple[str, ...]
    nearest: int | None
    site: str
    trace_seconds: float = 0.0
    compile_seconds: float = 0.0
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    compiler: str = ""
    advice: str = ""
    kind: str = "trace"
    from_disk: bool = False
    effects: tuple[str, ...] = ()
    when: float = 0.0
    kinds: tuple[str, ...] = ()

    @property
    def runs_python(self) -> bool:
        """Whether the user's Python ran."""
        return self.kind == "trace"

    @property
    def reason(self) -> str:
        """The reason for the trace, in one line."""
        return "; ".join(self.changes) or "first trace"

    def __str__(self) -> str:
        return f"{self.function} #{self.index} at {self.site}: {self.reason}"


class Events(Sequence[TraceEvent]):
    """Trace events, oldest first; `print` shows them as a table."""

    def __init__(self, name: str, events: list[TraceEvent]) -> None:
        self.name = name
        self._events = events

    @overload
    def __getitem__(self, index: int) -> TraceEvent: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TraceEvent]: ...
    def __getitem__(self, index: int | slice) -> TraceEvent | Sequence[TraceEvent]:
        return self._events[index]

    def __len__(self) -> int:
        return len(self._events)

    @property
    def traces(self) -> int:
        """The number of times that the user's Python ran."""
        return sum(event.runs_python for event in self._events)

    def __str__(self) -> str:
        return _table(self.name, self._events)

    def __repr__(self) -> str:
        return f"<ledger of {self.name}: {self.traces} traces>"


class Ledger(Events):
    """The trace events of one function.

    Attributes:
        code: The function's code, if the user wrote it.
    """

    def __init__(self, name: str, code: CodeType | None = None) -> None:
        super().__init__(name, [])
        self.code = code
        self._signatures: list[Signature | None] = []
        with _registry_lock:
            _registry.append(weakref.ref(self, _registry.remove))

    @property
    def signatures(self) -> Sequence[Signature | None]:
        """The signature of each event; None for an event that is no trace."""
        return self._signatures

    def record(self, event: TraceEvent, signature: Signature | None = None) -> int:
        """Adds an event and logs one line; returns its index."""
        with _registry_lock:  # a background thread may record a compilation
            event = replace(event, index=len(self._events) + 1, when=time.time())
            self._events.append(event)
            self._signatures.append(signature)
        log.info(
            "%s (traced in %.2f s, compiled in %.2f s)",
            event,
            event.trace_seconds,
            event.compile_seconds,
        )
        for listener in listeners:
            listener.traced(self, event)
        return event.index

    def add_compile_seconds(self, index: int, seconds: float) -> None:
        """Adds compile time to an event: some engines compile at the first run."""
        event = self._events[index - 1]
        self._events[index - 1] = replace(event, compile_seconds=event.compile_seconds + seconds)

    def set_compiler(self, index: int, compiler: str) -> None:
        """Sets the compiler of an event, chosen by measurement."""
        self._events[index - 1] = replace(self._events[index - 1], compiler=compiler)


class Listener(Protocol):
    """Receives the events of all functions."""

    def traced(self, ledger: Ledger, event: TraceEvent) -> None:
        """Called with each new event."""
        ...

    def affected(self, function: str, effect: Effect) -> None:
        """Called with each side effect of a function during tracing."""
        ...

    def stale(self, function: str, changes: Sequence[tuple[str, str, str]]) -> None:
        """Called with captured values that changed: where each is read, its old and new text."""
        ...


listeners: list[Listener] = []
_registry: list[weakref.ref[Ledger]] = []
_registry_lock = threading.Lock()


def ledger() -> Events:
    """The ledger of the whole process: the trace events of every function that is alive.

    Example:
        >>> import trainstep as ts
        >>> print(ts.ledger())  # doctest: +SKIP
    """
    with _registry_lock:
        alive = [found for ref in _registry if (found := ref()) is not None]
    return merged("all functions", alive)


def merged(name: str, ledgers: Sequence[Ledger]) -> Events:
    """The trace events of several functions, in order of time."""
    events = [event for each in ledgers for event in each]
    return Events(name, sorted(events, key=lambda event: event.when))


def _table(title: str, events: Sequence[TraceEvent]) -> str:
    # Rich is imported here, so that importing trainstep stays light.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    traces = sum(event.runs_python for event in events)
    table = Table(title=f"ledger of {title}: {traces} traces", title_justify="left")
    for heading in ("#", "function", "called at", "why", "seconds", "variables", "advice"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "called at")
    for e in events:
        compiler = "disk" if e.from_disk else e.compiler or "compile"
        seconds = f"trace {e.trace_seconds:.2f}\n{compiler} {e.compile_seconds:.2f}"
        variables = f"{len(e.reads)} read\n{len(e.writes)} written"
        why = "\n".join([e.reason, f"({e.signature})", *e.effects])
        number = str(e.index) if e.kind == "trace" else f"{e.index}\n{e.kind}"
        cells = [number, e.function, e.site, why, seconds, variables, e.advice]
        table.add_row(*map(Text, cells))  # a Text: Rich must not parse a signature as markup
    out = io.StringIO()
    Console(file=out, width=140, highlight=False).print(table)
    return out.getvalue()
