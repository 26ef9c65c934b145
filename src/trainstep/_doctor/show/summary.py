"""The report in a few lines: what stands at its head, and what to paste into an issue."""

from __future__ import annotations

import platform
import shlex

from trainstep._common.version import __version__
from trainstep._doctor.report import Report
from trainstep._doctor.show.grouping import processes
from trainstep._doctor.show.words import clean, count, place, seconds


def alarms(report: Report) -> list[str]:
    """What comes before everything else: functions that run uncompiled though they should not."""
    found = [finding for finding in report.findings if finding.kind == "recompile-limit"]
    return [
        f"NOT COMPILED any more: `{clean(each.function)}` at {place(each.site)}: {clean(each.what)}"
        for each in found
    ]


def state(report: Report) -> str:
    """How the run ended, if it did not end well."""
    if not report.complete:
        return "The run did not end by itself: this is what was noted until it was cut off."
    return f"The run ended in an error: {clean(report.error)}" if report.error else ""


def headline(report: Report) -> list[str]:
    """How much was traced, what it cost, and how much of that was avoidable."""
    told = [_whole(report)] if programs(report) or report.small else []
    if not report.findings:
        return [f"Nothing to report: {_as_needed(report)}", *told]
    if report.retraces:
        avoidable = seconds(report.avoidable_seconds)
        told.append(f"Avoidable: {report.retraces:,} of them, {avoidable}.")
    elif programs(report):
        told.append("Nothing of that was avoidable.")
    return [*told, f"{count(len(report.findings), 'finding')}."]


def programs(report: Report) -> int:
    """How many traces and compilations of functions there were."""
    return sum(len(function.events) for function in report.functions)


def share(report: Report) -> str:
    """The part of the run that went into traces and compilations; of one process alone."""
    if not report.seconds or len(processes(report)) > 1:
        return ""
    part = report.compile_seconds / report.seconds
    return "" if part > 1 else "under 1%" if 0 < part < 0.01 else f"{part:.0%}"


def versions(report: Report) -> dict[str, str]:
    """What to paste into an issue."""
    end = "cut off" if not report.complete else f"ended in {report.error}" if report.error else ""
    took = seconds(report.seconds) if report.seconds else ""
    here = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "trainstep": __version__,
    }
    told = {
        "command": shlex.join(report.command),
        "run": ", ".join(part for part in (took, end) if part),
        **here,
        **report.versions,  # of the run, which may have been elsewhere
    }
    return {clean(name): clean(value) for name, value in told.items() if value}


def _as_needed(report: Report) -> str:
    if not programs(report):
        return "no function was traced."
    again = sum(bool(function.retraces) for function in report.functions)
    once = sum(len(function.events) == 1 for function in report.functions)
    several = len(report.functions) - once - again
    parts = [f"{_were(once)} traced once, as needed"] if once else []
    if several:
        parts.append(f"{_were(several)} traced once for each way it is used")
    if again:
        parts.append(f"{_were(again)} traced again, {seconds(report.avoidable_seconds)}")
    return f"{'; '.join(parts)}."


def _were(number: int) -> str:
    return f"{count(number, 'function')} {'was' if number == 1 else 'were'}"


def _whole(report: Report) -> str:
    traces = count(report.traces, "trace")
    compilations = sum(function.compilations for function in report.functions)
    if compilations:
        traces += f" and {count(compilations, 'compilation')}"
    told = f"{traces} of {count(len(report.functions), 'function')}"
    small = sum(each.count for each in report.small)
    if small:
        told += f", {count(small, 'small program')} beside them"
    told += f": {seconds(report.compile_seconds)}"
    if len(processes(report)) > 1:
        told += f" in {len(processes(report))} processes"
    part = share(report)
    return told + (f", {part} of the run ({seconds(report.seconds)})." if part else ".")
