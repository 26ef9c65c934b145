"""Texts for the parts of a report, shared by terminal and page."""

from __future__ import annotations

from trainstep._common import user_code
from trainstep._doctor.records import Site
from trainstep._doctor.report import Event, Finding, Function

_PHASES = {"trace": "trace", "lower": "lower", "compile": "compile", "first_run": "first run"}

# The severity of each kind of finding; the keys are those of `_explain.causes.FINDINGS`.
_SEVERITY = {
    "recompile-limit": ("high", "runs uncompiled"),
    "retraces": ("medium", "costs time"),
    "compilations": ("medium", "costs time"),
    "frozen": ("high", "may be wrong"),
    "metrics": ("high", "may be wrong"),
    "stale": ("high", "may be wrong"),
    "side-effects": ("high", "may be wrong"),
    "leaks": ("high", "may be wrong"),
    "eager": ("medium", "costs time"),
    "graph-breaks": ("medium", "costs time"),
}


def clean(text: str) -> str:
    """A text in one line, without control characters."""
    return "".join(c if c.isprintable() else " " if c.isspace() else repr(c)[1:-1] for c in text)


def seconds(value: float) -> str:
    """A duration, in a readable unit."""
    if value < 0.0005:
        return "under 1 ms" if value > 0 else "0 s"
    if value < 0.0995:
        return f"{value * 1000:.0f} ms"
    if value < 9.995:
        return f"{value:.2f} s"
    if value < 119.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def count(number: int, noun: str) -> str:
    """`1 trace`, `3 traces`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def times(number: int) -> str:
    """`once`, `twice`, `3 times`."""
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")


def place(site: Site) -> str:
    """`train.py:41`."""
    return clean(user_code.name(site.file, site.line)) if site.file else "not in your code"


def where(site: Site) -> str:
    """`train.py:41: ` and the line."""
    if not site.file:
        return place(site)
    if site.text:
        return f"{place(site)}: `{clean(site.text.strip())}`"
    return clean(user_code.with_text(site.file, site.line))


def called(event: Event) -> str:
    """The user's line that caused a trace, and the Keras method that it called."""
    via = event.trace.via
    return where(event.trace.called) + (f", via {clean(via)}" if via else "")


def cost(event: Event) -> str:
    """The cost of a trace, in total and by phase."""
    phases = _phases(event)
    if not event.cost and not phases:
        return "cost unknown"
    return seconds(event.cost) + (f": {phases}" if phases else "")


def _phases(event: Event) -> str:
    trace = event.trace
    parts = []
    for phase, part in trace.seconds.items():
        name = _PHASES.get(phase, clean(phase))
        if trace.from_disk and phase == "compile":
            name = "from disk cache"
        parts.append(f"{name} {seconds(part)}")
    if trace.from_disk and "compile" not in trace.seconds:
        parts.append("from disk cache")
    return ", ".join(parts)


def why(function: Function, event: Event) -> str:
    """The causes of a trace, and the earlier trace that they compare with."""
    trace = event.trace
    made = "compiled without a trace: " if trace.what == "compile" else ""
    if not trace.causes:
        return made + _without_cause(event)
    changes = "; ".join(clean(cause.text or cause.kind) for cause in trace.causes)
    number = trace.nearest
    since = [e.index for e in function.events if number and e.trace.number == number]
    return made + changes + (f" (since #{since[0]})" if since else "")


def _without_cause(event: Event) -> str:
    if event.avoidable:
        return "unknown cause"
    mode = f" ({clean(event.trace.mode)})" if event.trace.mode else ""
    return f"needed: the first{mode}"


def how_often(function: Function) -> str:
    """`traced 4 times in 8 calls`."""
    parts = []
    if function.traces:
        parts.append(f"traced {times(function.traces)}")
    if function.compilations:
        parts.append(f"compiled {times(function.compilations)} without a trace")
    failed = sum(bool(event.trace.failed) for event in function.events)
    if failed:
        parts.append(f"failed to trace {times(failed)}")
    often = " and ".join(parts) or "not traced"
    return often if function.calls is None else f"{often} in {count(function.calls, 'call')}"


def costs(function: Function) -> str:
    """`8.10 s avoidable of 9.30 s`."""
    whole = seconds(function.seconds)
    if not function.retraces:
        return f"{whole}, as needed"
    return f"{seconds(function.avoidable_seconds)} avoidable of {whole}"


def severity(kind: str) -> tuple[str, str]:
    """The severity of a kind of finding, `high` or `medium`, and a badge for it."""
    return _SEVERITY.get(kind, ("medium", "to check"))


def extent(finding: Finding) -> str:
    """The count and the cost of a finding, where there are any."""
    parts = [times(finding.count)] if finding.count > 1 else []
    if finding.seconds:
        parts.append(seconds(finding.seconds))
    return ", ".join(parts)


def values(finding: Finding) -> str:
    """The value inside the program, the current one, and the line that noticed it."""
    if not (finding.before or finding.now):
        return ""
    then = "at `compile()`" if finding.kind == "frozen" else "when traced"
    both = f"{clean(finding.before)} {then}, {clean(finding.now)} now"
    noticed = f"at {where(finding.noticed)}" if finding.noticed.file else "at the end of the run"
    assigned = f"; assigned at {finding.assigned}" if finding.assigned else ""
    return f"{both}; noticed {noticed}{assigned}"
