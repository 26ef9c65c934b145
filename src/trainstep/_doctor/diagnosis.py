"""Turns records into a report: groups traces, separates needed from avoidable, adds cures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from trainstep._doctor.records import Calls, Cause, End, Incident, Note, Span, Start, Trace
from trainstep._doctor.report import Event, Finding, Function, Report, SmallPrograms
from trainstep._explain.causes import CURES, EFFECTS, FINDINGS, cure


def diagnose(records: Iterable[Any]) -> Report:
    """The report on a list of records."""
    found = _Diagnosis()
    for record in _with_common_clock(list(records)):
        found.add(record)
    return found.report()


def _with_common_clock(records: list[Any]) -> Iterable[Any]:
    """The records, with times measured from the start of the first process."""
    starts = {record.process: record.when for record in records if isinstance(record, Start)}
    first = min(starts.values(), default=0.0)
    for record in records:
        later = starts.get(record.process, first) - first
        yield replace(record, at=record.at + later) if later > 0 else record


def cost(trace: Trace) -> float:
    """The cost of a trace in seconds."""
    return sum(trace.seconds.values())


class _Diagnosis:
    """Collects records and builds the report."""

    def __init__(self) -> None:
        self._report = Report(complete=False)
        self._process: int | None = None  # the first process; all others are its children
        self._functions: dict[tuple[int, str], Function] = {}
        self._modes: set[tuple[int, str, str]] = set()
        self._inner: list[Trace] = []
        self._small: dict[tuple[str, int], SmallPrograms] = {}
        self._incidents: dict[Any, Incident] = {}

    def add(self, record: Any) -> None:
        """Adds a record."""
        report = self._report
        report.seconds = max(report.seconds, record.at)
        match record:
            case Trace(inside=number) if number:
                self._inner.append(record)
            case Trace(what="small"):
                self._add_small(record)
            case Trace():
                self._add_trace(record)
            case Incident():
                self._add_incident(record)
            case Calls():
                function = self._functions.get((record.process, record.group))
                if function is not None:
                    function.calls, function.call_times = record.count, record.times
            case Span():
                report.spans.append(record)
            case Note():
                report.notes.append(record)
            case Start():
                self._add_start(record)
            case End():
                report.versions |= record.versions
                if record.process == self._process:
                    report.complete, report.error = True, record.error

    def report(self) -> Report:
        """Builds the report."""
        self._add_inner()
        report = self._report
        for function in self._functions.values():
            function.events.sort(key=lambda event: event.trace.at)
            for index, event in enumerate(function.events, 1):
                event.index = index
        found = self._functions.values()
        report.functions = sorted(found, key=lambda f: (-f.avoidable_seconds, -f.seconds))
        report.small = sorted(self._small.values(), key=lambda small: -small.seconds)
        findings = [finding for f in report.functions for finding in _retraces(f)]
        findings += [_finding(each) for each in self._incidents.values()]
        order = list(FINDINGS)
        report.findings = sorted(findings, key=lambda f: (order.index(f.kind), -f.seconds))
        return report

    def _add_start(self, record: Start) -> None:
        if self._process is None:
            self._process = record.process
            self._report.command, self._report.versions = record.command, dict(record.versions)

    def _function(self, trace: Trace) -> Function:
        """The function of a trace."""
        new = Function(
            group=trace.group,
            name=trace.function,
            engine=trace.engine,
            defined=trace.defined,
            keras=trace.group.startswith("keras:"),
            process=trace.process,
        )
        return self._functions.setdefault((trace.process, trace.group), new)

    def _add_trace(self, trace: Trace) -> None:
        function = self._function(trace)
        mode = (trace.process, trace.group, trace.mode)
        avoidable = not trace.failed and (bool(trace.causes) or mode in self._modes)
        if not trace.failed:
            self._modes.add(mode)
        if avoidable and not trace.causes:
            trace.causes = [Cause("unknown", "doctor found no difference")]
        needed = {cause.kind for cause in trace.causes} == {"mode"}
        function.events.append(Event(0, trace, avoidable and not needed, cost(trace)))

    def _add_inner(self) -> None:
        """Adds traces inside other traces; the outer trace includes their time.

        Keras's functions on TensorFlow are nested. A retrace of an inner one counts as a trace of
        the whole function, and its time is subtracted from the outer trace.
        """
        known = self._functions.values()
        outer = {(f.process, event.trace.number): (f, event) for f in known for event in f.events}
        for trace in self._inner:
            function, event = outer.get((trace.process, trace.inside), (None, None))
            if function is None or event is None or trace.what != "trace":
                continue
            if trace.group == function.group:
                if trace.causes:
                    event.cost -= cost(trace)
                    function.events.append(Event(0, trace, True, cost(trace)))
                continue
            function.inner[trace.function] = function.inner.get(trace.function, 0) + 1
            note = f"traced inside `{function.name}`, which includes its time"
            inner = self._function(trace)
            inner.events.append(Event(0, replace(trace, note=note), False, 0.0))

    def _add_small(self, trace: Trace) -> None:
        found = self._small.setdefault(trace.called[:2], SmallPrograms(trace.called))
        found.count += 1
        found.names[trace.function] = found.names.get(trace.function, 0) + 1
        found.seconds += cost(trace)

    def _add_incident(self, record: Incident) -> None:
        """Adds an incident; repeated ones at the same line are counted together."""
        key = (record.process, record.kind, record.function, record.site[:2], record.what)
        known = self._incidents.get(key)
        if known is None:
            self._incidents[key] = replace(record)
        elif record.kind == "eager":
            known.count = max(known.count, record.count)
        else:
            known.count += record.count
            known.value, known.now = record.value or known.value, record.now


def _retraces(function: Function) -> Iterable[Finding]:
    """One finding per kind of cause; a trace with several counts for the most important."""
    by_cause: dict[tuple[str, str], list[Event]] = {}
    for event in function.events:
        if event.avoidable:
            key = (_main_cause(event.trace.causes), event.trace.what)
            by_cause.setdefault(key, []).append(event)
    for (kind, _), events in by_cause.items():
        fix = cure(kind, function.engine, keras=function.keras)
        function.fixes.append(fix)
        first = events[0].trace
        hidden = first.what == "compile"
        what = "compiled without a trace" if hidden else "traced again"
        texts = [cause.text for cause in first.causes if cause.kind == kind]
        yield Finding(
            kind="compilations" if hidden else "retraces",
            group=function.group,
            function=function.name,
            site=first.called,
            what=f"{what}: {'; '.join(texts)}",
            happens=FINDINGS["compilations" if hidden else "retraces"].happens,
            fix=fix,
            count=len(events),
            seconds=sum(event.cost for event in events),
            cause=kind,
            engine=function.engine,
            process=function.process,
        )


def _main_cause(causes: list[Cause]) -> str:
    kinds = {cause.kind for cause in causes}
    return next((kind for kind in CURES if kind in kinds), "unknown")


def _finding(record: Incident) -> Finding:
    advice = FINDINGS[record.kind]
    happens, fix = advice
    if record.kind in ("side-effects", "leaks"):
        effect = EFFECTS[record.detail]
        happens = effect.happens.format(value=record.value)
        bare = "" if record.group.startswith("keras:") else record.engine
        fix = advice.cure or _EFFECT.get((bare, record.detail), effect.cure)
    elif record.kind == "stale":
        record.what += f" has changed since the trace: {record.before} -> {record.now}"
        fix = _STALE.get("keras" if record.group.startswith("keras:") else record.engine, fix)
        if not record.noticed.file:
            happens += (
                "; noticed at the end: it matters only if the function was called after the change"
            )
    elif record.kind == "eager":
        fix = _EAGER.get(record.engine, fix)
        if record.detail == "late":
            happens += "; the count is a lower bound, as this line also used compiled functions"
    elif record.value:
        happens = f"{happens}: {record.value}"
    return Finding(
        kind=record.kind,
        group=record.group,
        function=record.function,
        site=record.site,
        what=record.what,
        happens=happens,
        fix=fix,
        count=record.count,
        before=record.before,
        now=record.now,
        noticed=record.noticed,
        assigned=record.value if record.kind == "stale" else "",
        engine=record.engine,
        process=record.process,
    )


_STALE = {
    "keras": "keep it in a keras.Variable, or as a weight of the layer, and assign to that",
    "jax": "pass it as an argument of the function",
    "tensorflow": "pass it as an argument, as a tensor, or keep it in a tf.Variable",
}
_EFFECT = {
    ("jax", "random"): (
        "use jax.random with a key that is an argument of the function, or draw outside of it "
        "and pass the numbers as an argument"
    ),
    ("jax", "print"): "use jax.debug.print, which runs at every call",
    ("jax", "write"): "return the value from the function",
}
_EAGER = {
    "tensorflow": "put `@tf.function` on the enclosing function (build model and optimizer first)",
    "jax": "put `jax.jit` on the function that computes the gradient and the update",
    "torch": "train with trainstep.Trainer or trainstep.function, or `torch.compile` the loss",
}
