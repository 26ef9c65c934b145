"""The ledger: what was traced and compiled, when, from where, and why.

One `TraceEvent` per trace and per further program of it, one `Ledger` per function. `ledger()` is
the view over all functions of the process; it holds them weakly, so a dropped function leaves it.
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
    """One entry: a trace of a function, or what became of one.

    Attributes:
        index: 1 for the function's first entry.
        function: The function's name.
        signature: What the program was compiled for.
        changes: What differs from the nearest earlier signature, part by part.
        nearest: The index of that earlier trace; None for the first.
        site: The user's file and line that called.
        trace_seconds: Time spent running the user's Python and recording it.
        compile_seconds: Time spent in the engine's compiler.
        reads: Paths of the variables that the program reads.
        writes: Paths of the variables that it writes.
        compiler: Which of the engine's compilers made the program.
        advice: One line on what to do about it.
        kind: `"trace"`: the user's Python was run. `"bucket"`: what a trace recorded for sizes
            that vary was compiled for some. `"refused"`: a trace cannot serve other sizes.
            `"evicted"`: a program was dropped.
        when: The moment, in seconds since the epoch.
        effects: What the step did in Python that it will not do again, each with its line.
        from_disk: Whether the program came from the engine's cache on disk.
        kinds: The kind of each of the changes, a key of `_cures.CURES`.
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
        """Whether the user's Python was run for it."""
        return self.kind == "trace"

    @property
    def reason(self) -> str:
        """Why it was traced, in one line."""
        return "; ".join(self.changes) or "first trace"

    def __str__(self) -> str:
        return f"{self.function} #{self.index} at {self.site}: {self.reason}"


class Events(Sequence[TraceEvent]):
    """Traces, oldest first. Printing them gives a table."""

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
        """How often the user's Python was run."""
        return sum(event.runs_python for event in self._events)

    def __str__(self) -> str:
        return _table(self.name, self._events)

    def __repr__(self) -> str:
        return f"<ledger of {self.name}: {self.traces} traces>"


class Ledger(Events):
    """The traces of one function.

    Attributes:
        code: The function's code, if it is one that the user wrote.
    """

    def __init__(self, name: str, code: CodeType | None = None) -> None:
        super().__init__(name, [])
        self.code = code
        self._signatures: list[Signature | None] = []
        with _registry_lock:
            _registry.append(weakref.ref(self, _registry.remove))

    @property
    def signatures(self) -> Sequence[Signature | None]:
        """The signature of each event; None of what is no trace."""
        return self._signatures

    def record(self, event: TraceEvent, signature: Signature | None = None) -> int:
        """Adds an event and logs one line; returns its index."""
        with _registry_lock:  # a program may have been compiled in the background
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
        """Some engines compile at the first run; this puts that time where it belongs."""
        event = self._events[index - 1]
        self._events[index - 1] = replace(event, compile_seconds=event.compile_seconds + seconds)

    def set_compiler(self, index: int, compiler: str) -> None:
        """A compiler was chosen by measuring."""
        self._events[index - 1] = replace(self._events[index - 1], compiler=compiler)


class Listener(Protocol):
    """Who is told of all functions."""

    def traced(self, ledger: Ledger, event: TraceEvent) -> None:
        """Told of an entry."""
        ...

    def affected(self, function: str, effect: Effect) -> None:
        """Told of Python that ran while a function was traced."""
        ...

    def stale(self, function: str, changes: Sequence[tuple[str, str, str]]) -> None:
        """Told of values that a function holds and that have changed since."""
        ...


listeners: list[Listener] = []
_registry: list[weakref.ref[Ledger]] = []
_registry_lock = threading.Lock()


def ledger() -> Events:
    """The ledger of the whole process: every trace of every function that is alive.

    Example:
        >>> import trainstep as ts
        >>> print(ts.ledger())  # doctest: +SKIP
    """
    with _registry_lock:
        alive = [found for ref in _registry if (found := ref()) is not None]
    return merged("all functions", alive)


def merged(name: str, ledgers: Sequence[Ledger]) -> Events:
    """The traces of several functions together, in the order in which they were made."""
    events = [event for each in ledgers for event in each]
    return Events(name, sorted(events, key=lambda event: event.when))


def _table(title: str, events: Sequence[TraceEvent]) -> str:
    # Rich is imported when a table is asked for, so that importing trainstep stays light.
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
        table.add_row(*map(Text, cells))  # a Text: no part of a signature is taken for markup
    out = io.StringIO()
    Console(file=out, width=140, highlight=False).print(table)
    return out.getvalue()
