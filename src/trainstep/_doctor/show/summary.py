"""The head of a report, and the versions to paste into an issue."""

from __future__ import annotations

import platform
import shlex

from trainstep._common.version import __version__
from trainstep._doctor.report import Report
from trainstep._doctor.show.grouping import processes
from trainstep._doctor.show.words import clean, count, place, seconds


def alarms(report: Report) -> list[str]:
    """The first lines of a report: functions that PyTorch no longer compiles."""
    found = [finding for finding in report.findings if finding.kind == "recompile-limit"]
    return [
        f"NO LONGER COMPILED: `{clean(each.function)}` at {place(each.site)}: {clean(each.what)}"
        for each in found
    ]


def state(report: Report) -> str:
    """How the run ended, if it failed or was cut off."""
    if not report.complete:
        return "The run was cut off: this report covers it up to then."
    return f"The run ended with an error: {clean(report.error)}" if report.error else ""


def headline(report: Report) -> list[str]:
    """The number of traces, their cost, and the avoidable part."""
    lines = [_whole(report)] if programs(report) or report.small else []
    if not report.findings:
        return [f"Nothing to report: {_as_needed(report)}", *lines]
    if report.retraces:
        avoidable = seconds(report.avoidable_seconds)
        lines.append(f"Avoidable: {report.retraces:,} of them, {avoidable}.")
    elif programs(report):
        lines.append("None of it was avoidable.")
    return [*lines, f"{count(len(report.findings), 'finding')}."]


def programs(report: Report) -> int:
    """The number of traces and compilations of functions."""
    return sum(len(function.events) for function in report.functions)


def share(report: Report) -> str:
    """The share of the run spent on traces and compilations; for a single process only."""
    if not report.seconds or len(processes(report)) > 1:
        return ""
    part = report.compile_seconds / report.seconds
    return "" if part > 1 else "under 1%" if 0 < part < 0.01 else f"{part:.0%}"


def versions(report: Report) -> dict[str, str]:
    """The command, the run and the versions, to paste into an issue."""
    end = "cut off" if not report.complete else f"ended with {report.error}" if report.error else ""
    took = seconds(report.seconds) if report.seconds else ""
    here = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "trainstep": __version__,
    }
    values = {
        "command": shlex.join(report.command),
        "run": ", ".join(part for part in (took, end) if part),
        **here,
        **report.versions,  # the run may have been on another machine
    }
    return {clean(name): clean(value) for name, value in values.items() if value}


def _as_needed(report: Report) -> str:
    if not programs(report):
        return "no function was traced."
    again = sum(bool(function.retraces) for function in report.functions)
    once = sum(len(function.events) == 1 for function in report.functions)
    several = len(report.functions) - once - again
    parts = [f"{_were(once)} traced once, as needed"] if once else []
    if several:
        parts.append(f"{_were(several)} traced once per mode")
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
    line = f"{traces} of {count(len(report.functions), 'function')}"
    small = sum(each.count for each in report.small)
    if small:
        line += f", plus {count(small, 'small program')}"
    line += f": {seconds(report.compile_seconds)}"
    if len(processes(report)) > 1:
        line += f" in {len(processes(report))} processes"
    part = share(report)
    return line + (f", {part} of the run ({seconds(report.seconds)})." if part else ".")
