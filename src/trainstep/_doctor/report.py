"""The report as data; `show` displays it as text or as a page."""

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
        avoidable: Whether the function had been traced in this mode before.
        cost: Its seconds in total.
    """

    index: int
    trace: Trace
    avoidable: bool
    cost: float

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        trace = self.trace
        return {
            "index": self.index,
            "number": trace.number,  # the target of `nearest`
            "at": trace.at,
            "what": trace.what,
            **_site_fields(trace.called),
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
    """A function and all its traces.

    Attributes:
        group: Its identity.
        name: Its name, or "train function of model ..." for one that Keras made.
        engine: The engine.
        defined: The line of its definition.
        keras: Whether Keras made it for a model.
        calls: The number of calls; None if unknown.
        call_times: The times of some calls.
        events: Its traces and compilations.
        inner: Functions traced inside it, with the number of traces.
        fixes: A cure for each cause of its avoidable traces.
        process: The process id.
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
        """The number of traces that succeeded."""
        done = [event.trace for event in self.events if not event.trace.failed]
        return sum(trace.what == "trace" for trace in done)

    @property
    def compilations(self) -> int:
        """The number of compilations without a trace."""
        return sum(event.trace.what == "compile" for event in self.events)

    @property
    def retraces(self) -> int:
        """The number of avoidable traces and compilations."""
        return sum(event.avoidable for event in self.events)

    @property
    def seconds(self) -> float:
        """The cost of all traces and compilations."""
        return sum(event.cost for event in self.events)

    @property
    def avoidable_seconds(self) -> float:
        """The cost of the avoidable ones."""
        return sum(event.cost for event in self.events if event.avoidable)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "name": self.name,
            "engine": self.engine,
            **_site_fields(self.defined),
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
    """A finding: a fact, its consequence and its cure.

    Attributes:
        kind: A key of `_explain.causes.FINDINGS`, as in `--fail-on`.
        group: The identity of the function concerned, if there is one.
        function: The function's name.
        site: The user's line.
        what: The fact.
        happens: The consequence.
        fix: The cure.
        count: The number of occurrences.
        seconds: Its cost, where known.
        cause: The kind of cause of retraces, a key of `_explain.causes.CURES`.
        before: The value inside the program.
        now: The current value.
        noticed: The line at which doctor noticed it; empty: the end of the run.
        assigned: The lines that assign to the value.
        process: The process id.
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
        """The JSON form."""
        fields = dataclasses.asdict(self)
        del fields["site"]
        return {**fields, **_site_fields(self.site), "noticed": _site_fields(self.noticed)}


@dataclass(slots=True)
class SmallPrograms:
    """The small programs of one user line: single operations, and programs of the engine's own."""

    site: Site
    names: dict[str, int] = field(default_factory=dict)
    count: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        fields = {"count": self.count, "seconds": round(self.seconds, 4), "names": self.names}
        return {**_site_fields(self.site), **fields}


@dataclass(slots=True)
class Report:
    """The report on a run.

    Attributes:
        functions: The functions, costliest first.
        findings: The findings, most important first.
        small: The small programs, by user line.
        spans: The calls of Keras methods.
        notes: The limits of the report.
        versions: The versions of the imported libraries.
        command: The command line.
        seconds: The duration of the run.
        error: The error that ended the run.
        complete: Whether the run reached its end.
    """

    functions: list[Function] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    small: list[SmallPrograms] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""
    complete: bool = True

    @property
    def retraces(self) -> int:
        """The number of avoidable traces and compilations."""
        return sum(function.retraces for function in self.functions)

    @property
    def traces(self) -> int:
        """The number of traces."""
        return sum(function.traces for function in self.functions)

    @property
    def compile_seconds(self) -> float:
        """The cost of all traces and compilations, small programs included."""
        return sum(f.seconds for f in self.functions) + sum(s.seconds for s in self.small)

    @property
    def avoidable_seconds(self) -> float:
        """The cost of the avoidable ones."""
        return sum(function.avoidable_seconds for function in self.functions)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
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


def _site_fields(site: Site) -> dict[str, Any]:
    return {"file": site.file, "line": site.line, "text": site.text}
