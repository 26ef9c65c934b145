"""What of a report is shown together: findings by function, and traces that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainstep._doctor.report import Event, Finding, Function, Report

_SHOWN = 2  # of the traces of one kind, before the rest is folded


@dataclass(slots=True)
class Section:
    """A function and what was found about it; None for what is about none that was traced."""

    name: str
    function: Function | None
    findings: list[Finding] = field(default_factory=list)

    @property
    def fixes(self) -> list[str]:
        """What the function's traces need and no finding says."""
        fixes = self.function.fixes if self.function else []
        return [fix for fix in fixes if not any(fix in found.fix for found in self.findings)]


@dataclass(slots=True)
class Fold:
    """A trace, and those like it that are not worth a line each."""

    event: Event
    more: list[Event] = field(default_factory=list)

    @property
    def cost(self) -> float:
        """What those cost that are folded."""
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


def alike(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings by what they say: those that differ in their lines alone are told once."""
    groups: dict[object, list[Finding]] = {}
    for found in findings:
        words = (found.kind, found.what, found.happens, found.fix, found.cause)
        numbers = (found.count, found.seconds, found.before, found.now, found.noticed)
        groups.setdefault((words, numbers), []).append(found)
    return list(groups.values())


def without_findings(report: Report) -> list[Function]:
    """The functions of which there is nothing to say."""
    told = {id(section.function) for section in sections(report)}
    return [function for function in report.functions if id(function) not in told]


def costliest(report: Report, number: int = 3) -> list[Function]:
    """The functions that cost most: first by what was avoidable, then by all."""
    return sorted(report.functions, key=lambda f: (-f.avoidable_seconds, -f.seconds))[:number]


def folded(events: Sequence[Event]) -> list[Fold]:
    """Traces in their order, all but the first few of each kind folded into the last shown."""
    kinds: dict[object, list[Event]] = {}
    for event in events:
        kinds.setdefault(_kind(event), []).append(event)
    folds = []
    for alike in kinds.values():
        # One more line says as much as "and 1 more".
        shown = _SHOWN if len(alike) > _SHOWN + 1 else len(alike)
        folds += [Fold(event) for event in alike[:shown]]
        folds[-1].more = alike[shown:]
    return sorted(folds, key=lambda fold: fold.event.index)


def processes(report: Report) -> list[int]:
    """The processes that are told of."""
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
