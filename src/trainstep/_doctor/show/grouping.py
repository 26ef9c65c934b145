"""Groups a report for display: findings by function, similar traces folded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainstep._doctor.report import Event, Finding, Function, Report

_SHOWN = 2  # traces of one kind before the rest is folded


@dataclass(slots=True)
class Section:
    """A function and its findings; the function is None if it was never traced."""

    name: str
    function: Function | None
    findings: list[Finding] = field(default_factory=list)

    @property
    def fixes(self) -> list[str]:
        """The cures of the function's traces that no finding mentions."""
        fixes = self.function.fixes if self.function else []
        return [fix for fix in fixes if not any(fix in found.fix for found in self.findings)]


@dataclass(slots=True)
class Fold:
    """A trace, and similar ones that are folded into its line."""

    event: Event
    more: list[Event] = field(default_factory=list)

    @property
    def cost(self) -> float:
        """The cost of the folded traces."""
        return sum(event.cost for event in self.more)


def sections(report: Report) -> list[Section]:
    """The findings by function, in the order of the report."""
    found: dict[object, Section] = {}
    for finding in report.findings:
        function = _function_of(report, finding)
        key = id(function) if function else (finding.function, finding.process)
        section = found.setdefault(key, Section(finding.function, function))
        section.findings.append(finding)
    return list(found.values())


def grouped_by_text(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Groups findings that differ only in their lines."""
    groups: dict[object, list[Finding]] = {}
    for found in findings:
        words = (found.kind, found.what, found.happens, found.fix, found.cause)
        numbers = (found.count, found.seconds, found.before, found.now, found.noticed)
        groups.setdefault((words, numbers), []).append(found)
    return list(groups.values())


def without_findings(report: Report) -> list[Function]:
    """The functions without a finding."""
    reported = {id(section.function) for section in sections(report)}
    return [function for function in report.functions if id(function) not in reported]


def costliest(report: Report, number: int = 3) -> list[Function]:
    """The functions that cost most: first by avoidable, then by total cost."""
    return sorted(report.functions, key=lambda f: (-f.avoidable_seconds, -f.seconds))[:number]


def folded(events: Sequence[Event]) -> list[Fold]:
    """The traces in order; all but the first few of each kind are folded."""
    kinds: dict[object, list[Event]] = {}
    for event in events:
        kinds.setdefault(_kind(event), []).append(event)
    folds = []
    for grouped_by_text in kinds.values():
        # A single remaining trace is shown: "and 1 more" would take a line too.
        shown = _SHOWN if len(grouped_by_text) > _SHOWN + 1 else len(grouped_by_text)
        folds += [Fold(event) for event in grouped_by_text[:shown]]
        folds[-1].more = grouped_by_text[shown:]
    return sorted(folds, key=lambda fold: fold.event.index)


def processes(report: Report) -> list[int]:
    """The ids of the processes in the report."""
    ran = {function.process for function in report.functions}
    return sorted(ran | {finding.process for finding in report.findings})


def _kind(event: Event) -> object:
    trace = event.trace
    causes = tuple(sorted({cause.kind for cause in trace.causes}))
    line = (trace.called.file, trace.called.line, trace.via, trace.mode)
    return (trace.what, line, causes, event.avoidable, trace.from_disk, trace.failed)


def _function_of(report: Report, finding: Finding) -> Function | None:
    found = (finding.process, finding.group)
    return next((f for f in report.functions if (f.process, f.group) == found), None)
