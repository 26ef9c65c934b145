"""What a report says, whatever it is shown as: text, JSON or a page."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from trainstep._doctor.records import NOWHERE, Note, Site, Span, Trace

FORMAT = 1


@dataclass(slots=True)
class Event:
    """One trace or compilation of a function.

    Attributes:
        index: 1 for the first of the function.
        avoidable: Whether it was no first trace of the function in its mode.
        cost: All its seconds.
    """

    index: int
    trace: Trace
    avoidable: bool
    cost: float

    def to_dict(self) -> dict[str, Any]:
        """As it is in JSON."""
        trace = self.trace
        return {
            "index": self.index,
            "number": trace.number,  # which `nearest` refers to
            "at": trace.at,
            "what": trace.what,
            **_site(trace.called),
            "via": trace.via,
            "mode": trace.mode,
            "avoidable": self.avoidable,
            "signature": trace.signature,
            "nearest": trace.nearest,
            "causes": [cause._asdict() for cause in trace.causes],
            "seconds": trace.seconds,
            "from_disk": trace.from_disk,
            "failed": trace.failed,
            "note": trace.note,
        }


@dataclass(slots=True)
class Function:
    """A function, and all its traces.

    Attributes:
        group: What tells it from others.
        name: Its name, or what Keras runs for a model.
        engine: The engine.
        defined: Where it is defined.
        keras: Whether it is one that Keras made for a model.
        calls: How often it was called; None where that is not known.
        call_times: When some of the calls were.
        events: Its traces and compilations.
        inner: Functions that were traced inside, and how often.
        fixes: What to do about those that were avoidable, one line for each cause.
        process: The process that it ran in.
    """

    group: str
    name: str
    engine: str
    defined: Site
    keras: bool = False
    calls: int | None = None
    call_times: list[float] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    inner: dict[str, int] = field(default_factory=dict)
    fixes: list[str] = field(default_factory=list)
    process: int = 0

    @property
    def traces(self) -> int:
        """How often it was traced, to the end."""
        done = [event.trace for event in self.events if not event.trace.failed]
        return sum(trace.what == "trace" for trace in done)

    @property
    def compilations(self) -> int:
        """How often it was compiled without a trace."""
        return sum(event.trace.what == "compile" for event in self.events)

    @property
    def retraces(self) -> int:
        """How many of its traces and compilations were avoidable."""
        return sum(event.avoidable for event in self.events)

    @property
    def seconds(self) -> float:
        """What all cost."""
        return sum(event.cost for event in self.events)

    @property
    def avoidable_seconds(self) -> float:
        """What those cost that were avoidable."""
        return sum(event.cost for event in self.events if event.avoidable)

    def to_dict(self) -> dict[str, Any]:
        """As it is in JSON."""
        return {
            "name": self.name,
            "engine": self.engine,
            **_site(self.defined),
            "keras": self.keras,
            "calls": self.calls,
            "traces": self.traces,
            "compilations": self.compilations,
            "retraces": self.retraces,
            "seconds": round(self.seconds, 4),
            "avoidable_seconds": round(self.avoidable_seconds, 4),
            "events": [event.to_dict() for event in self.events],
            "inner": self.inner,
            "fixes": self.fixes,
            "process": self.process,
        }


@dataclass(slots=True)
class Finding:
    """Something to change.

    Attributes:
        kind: A key of `_advice.FINDINGS`, which `--fail-on` takes.
        group: What tells the function that it is about from others, if there is one.
        function: That function's name.
        site: The user's line.
        what: The fact.
        happens: What that means.
        fix: What to do.
        count: How often it happened.
        seconds: What it cost, where that is known.
        cause: The kind of the cause of retraces, a key of `_cures.CURES`.
        before: The value that a program holds.
        now: The value that there is now.
        noticed: Where that was noticed; empty: at the end.
        assigned: The lines that assign to it.
        process: The process that it happened in.
    """

    kind: str
    group: str
    function: str
    site: Site
    what: str
    happens: str
    fix: str
    count: int = 1
    seconds: float = 0.0
    cause: str = ""
    before: str = ""
    now: str = ""
    noticed: Site = NOWHERE
    assigned: str = ""
    engine: str = ""
    process: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As it is in JSON."""
        said = dataclasses.asdict(self)
        del said["site"]
        return {**said, **_site(self.site), "noticed": _site(self.noticed)}


@dataclass(slots=True)
class Small:
    """Programs of single operations, and of libraries for themselves, of one line of the user's."""

    site: Site
    names: dict[str, int] = field(default_factory=dict)
    count: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As it is in JSON."""
        said = {"count": self.count, "seconds": round(self.seconds, 4), "names": self.names}
        return {**_site(self.site), **said}


@dataclass(slots=True)
class Report:
    """All that there is to say about a run.

    Attributes:
        functions: The functions, the costliest first.
        findings: What to change, the most important first.
        small: Small programs, by the user's line.
        spans: Calls of Keras's methods.
        notes: What doctor could not see.
        versions: Of everything that was imported.
        command: What was run.
        seconds: How long it ran.
        error: The error that it ended in.
        complete: Whether the run ended by itself.
    """

    functions: list[Function] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    small: list[Small] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""
    complete: bool = True

    @property
    def retraces(self) -> int:
        """How many traces and compilations were avoidable."""
        return sum(function.retraces for function in self.functions)

    @property
    def traces(self) -> int:
        """How many traces there were."""
        return sum(function.traces for function in self.functions)

    @property
    def compile_seconds(self) -> float:
        """What all traces and compilations cost, small ones included."""
        return sum(f.seconds for f in self.functions) + sum(s.seconds for s in self.small)

    @property
    def avoidable_seconds(self) -> float:
        """What those cost that were avoidable."""
        return sum(function.avoidable_seconds for function in self.functions)

    def to_dict(self) -> dict[str, Any]:
        """As it is in JSON."""
        return {
            "format": FORMAT,
            "command": self.command,
            "versions": self.versions,
            "seconds": round(self.seconds, 4),
            "error": self.error,
            "complete": self.complete,
            "retraces": self.retraces,
            "compile_seconds": round(self.compile_seconds, 4),
            "avoidable_seconds": round(self.avoidable_seconds, 4),
            "traces": self.traces,
            "functions": [function.to_dict() for function in self.functions],
            "findings": [finding.to_dict() for finding in self.findings],
            "small": [small.to_dict() for small in self.small],
            "notes": [note.text for note in self.notes],
        }


def _site(site: Site) -> dict[str, Any]:
    return {"file": site.file, "line": site.line, "text": site.text}
