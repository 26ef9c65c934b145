"""From records to a report: which traces belong together, which were needed, what to change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from trainstep._doctor.records import Calls, Cause, End, Happened, Note, Span, Start, Trace
from trainstep._doctor.report import Event, Finding, Function, Report, Small
from trainstep._explain.causes import CURES, EFFECTS, FINDINGS, cure


def diagnose(records: Iterable[Any]) -> Report:
    """All that records tell."""
    found = _Diagnosis()
    for record in _on_one_clock(list(records)):
        found.add(record)
    return found.report()


def _on_one_clock(records: list[Any]) -> Iterable[Any]:
    """Records whose moments count from the start of the first process."""
    starts = {record.process: record.when for record in records if isinstance(record, Start)}
    first = min(starts.values(), default=0.0)
    for record in records:
        later = starts.get(record.process, first) - first
        yield replace(record, at=record.at + later) if later > 0 else record


def cost(trace: Trace) -> float:
    """What a trace cost, in seconds."""
    return sum(trace.seconds.values())


class _Diagnosis:
    """A report in the making."""

    def __init__(self) -> None:
        self._report = Report(complete=False)
        self._process: int | None = None  # the first, which the others are children of
        self._functions: dict[tuple[int, str], Function] = {}
        self._modes: set[tuple[int, str, str]] = set()
        self._inner: list[Trace] = []
        self._small: dict[tuple[str, int], Small] = {}
        self._happened: dict[Any, Happened] = {}

    def add(self, record: Any) -> None:
        """Takes in a record."""
        report = self._report
        report.seconds = max(report.seconds, record.at)
        match record:
            case Trace(inside=number) if number:
                self._inner.append(record)
            case Trace(what="small"):
                self._add_small(record)
            case Trace():
                self._add_trace(record)
            case Happened():
                self._add_happened(record)
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
        """The report."""
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
        findings += [_finding(each) for each in self._happened.values()]
        order = list(FINDINGS)
        report.findings = sorted(findings, key=lambda f: (order.index(f.kind), -f.seconds))
        return report

    def _add_start(self, record: Start) -> None:
        if self._process is None:
            self._process = record.process
            self._report.command, self._report.versions = record.command, dict(record.versions)

    def _function(self, trace: Trace) -> Function:
        """The function that a trace is of."""
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
            trace.causes = [Cause("unknown", "nothing that doctor can see differs")]
        needed = {cause.kind for cause in trace.causes} == {"mode"}
        function.events.append(Event(0, trace, avoidable and not needed, cost(trace)))

    def _add_inner(self) -> None:
        """Traces inside of others: their time is counted there.

        Keras's functions on TensorFlow are nested: there, an inner one that is traced again is a
        trace of the whole, and its time is taken off the outer one's.
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
            note = f"inside of `{function.name}`, whose time has it"
            inner = self._function(trace)
            inner.events.append(Event(0, replace(trace, note=note), False, 0.0))

    def _add_small(self, trace: Trace) -> None:
        found = self._small.setdefault(trace.called[:2], Small(trace.called))
        found.count += 1
        found.names[trace.function] = found.names.get(trace.function, 0) + 1
        found.seconds += cost(trace)

    def _add_happened(self, record: Happened) -> None:
        """The same thing at the same line is one thing."""
        key = (record.process, record.kind, record.function, record.site[:2], record.what)
        known = self._happened.get(key)
        if known is None:
            self._happened[key] = replace(record)
        elif record.kind == "eager":
            known.count = max(known.count, record.count)
        else:
            known.count += record.count
            known.value, known.now = record.value or known.value, record.now


def _retraces(function: Function) -> Iterable[Finding]:
    """One finding for each kind of cause, the weightiest of a trace."""
    by_cause: dict[tuple[str, str], list[Event]] = {}
    for event in function.events:
        if event.avoidable:
            key = (_main(event.trace.causes), event.trace.what)
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


def _main(causes: list[Cause]) -> str:
    kinds = {cause.kind for cause in causes}
    return next((kind for kind in CURES if kind in kinds), "unknown")


def _finding(record: Happened) -> Finding:
    advice = FINDINGS[record.kind]
    happens, fix = advice
    if record.kind in ("side-effects", "leaks"):
        effect = EFFECTS[record.detail]
        happens = effect.happens.format(value=record.value)
        bare = "" if record.group.startswith("keras:") else record.engine
        fix = advice.cure or _EFFECT.get((bare, record.detail), effect.cure)
    elif record.kind == "stale":
        record.what += f" has changed since it was traced: {record.before} -> {record.now}"
        fix = _STALE.get("keras" if record.group.startswith("keras:") else record.engine, fix)
        if not record.noticed.file:
            happens += "; seen at the end: it matters if the function was called since the change"
    elif record.kind == "eager":
        fix = _EAGER.get(record.engine, fix)
        if record.detail == "late":
            happens += "; at least as often as said: it began among gradients of compiled functions"
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
        "draw with jax.random and a key that is an argument of the function, or draw outside of it "
        "and pass the numbers as an argument"
    ),
    ("jax", "print"): "jax.debug.print, which runs at every call",
    ("jax", "write"): "return the value from the function",
}
_EAGER = {
    "tensorflow": "put `@tf.function` on the function around it (build model and optimizer first)",
    "jax": "put `jax.jit` around the function that takes the gradient and updates",
    "torch": "train with trainstep.Trainer or trainstep.function, or `torch.compile` the loss",
}
