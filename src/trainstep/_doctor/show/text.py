"""The report as text for a terminal.

In order of importance: functions that are no longer compiled, the total cost, the costliest
functions, the findings with lines and cures, the rest in short, the versions.
"""

from __future__ import annotations

from trainstep._doctor.report import Finding, Function, Report
from trainstep._doctor.show import words
from trainstep._doctor.show.grouping import (
    Section,
    costliest,
    folded,
    grouped_by_text,
    processes,
    sections,
    without_findings,
)
from trainstep._doctor.show.summary import alarms, headline, state, versions
from trainstep._doctor.show.terminal import TerminalText
from trainstep._doctor.show.words import clean

_MOST_SMALL = 5
_MOST_ALIKE = 5  # findings of one kind about one function
_MOST_NEEDED = 10
_COLORS = {"high": "bold red", "medium": "bold yellow"}


def text(report: Report, *, width: int = 100, color: bool = False) -> str:
    """The report as text.

    Args:
        report: The report.
        width: The maximum line length; only a path or other single word exceeds it.
        color: Whether to colour it with ANSI codes.

    Returns:
        The text, with a line break at the end.
    """
    paper = TerminalText(width)
    _head(paper, report)
    _costliest(paper, report)
    for section in sections(report):
        _section(paper, report, section)
    _needed(paper, report)
    _small(paper, report)
    _notes(paper, report)
    _versions(paper, report)
    return paper.colored() if color else paper.plain()


def _head(paper: TerminalText, report: Report) -> None:
    for alarm in alarms(report):
        paper.write(alarm, style="bold red")
    for line in headline(report):
        paper.write(line, style="bold")
    paper.write(state(report), style="yellow")


def _costliest(paper: TerminalText, report: Report) -> None:
    functions = costliest(report)
    if len(functions) < 2 or not report.findings:
        return
    paper.heading("The three costliest" if len(functions) == 3 else "The costliest")
    for number, function in enumerate(functions, 1):
        line = f"{_name(function, report)}: {words.costs(function)}, {words.how_often(function)}"
        paper.label(f"{number}.", line, indent=2, hang=4)


def _name(function: Function, report: Report) -> str:
    parts = [function.engine]
    if function.keras:
        parts.append("made by Keras")
    elif function.defined.file:
        parts.append(words.place(function.defined))
    if len(processes(report)) > 1:
        parts.append(f"process {function.process}")
    line = ", ".join(part for part in parts if part)
    return f"`{clean(function.name)}`" + (f" ({clean(line)})" if line else "")


def _section(paper: TerminalText, report: Report, section: Section) -> None:
    function = section.function
    if function is None:
        paper.heading(f"`{clean(section.name)}`" if section.name else "The script")
    else:
        paper.heading(_name(function, report))
        paper.write(f"{words.how_often(function)}: {words.costs(function)}", indent=2)
        paper.write(_inside(function), indent=2)
    kinds: dict[str, list[list[Finding]]] = {}
    for group in grouped_by_text(section.findings):
        kinds.setdefault(group[0].kind, []).append(group)
    for kind, groups in kinds.items():
        for group in groups[:_MOST_ALIKE]:
            _findings(paper, group)
        if groups[_MOST_ALIKE:]:
            paper.blank_line()
        _rest(paper, len(groups) - _MOST_ALIKE, f"of {kind}", indent=2)
    for fix in section.fixes:
        paper.label("to fix:", clean(fix), indent=6, hang=9, style="bold green")
    if function is not None:
        _traces(paper, function)


def _inside(function: Function) -> str:
    inner = (f"`{clean(name)}` {words.times(often)}" for name, often in function.inner.items())
    return f"traced inside it: {', '.join(inner)}" if function.inner else ""


def _findings(paper: TerminalText, group: list[Finding]) -> None:
    finding = group[0]
    extent = words.extent(finding)
    line = clean(finding.what) + (f" ({extent})" if extent else "")
    color = _COLORS[words.severity(finding.kind)[0]]
    paper.blank_line()
    kind = f"{finding.kind}:"
    paper.label(kind, line or "found", indent=2, hang=len(kind) + 1, style=color)
    sites = [words.where(each.site) for each in group if each.site.file]
    for number, site in enumerate(sites[:_MOST_ALIKE]):
        paper.label("" if number else "at:", site, indent=6, hang=9)
    _rest(paper, len(sites) - _MOST_ALIKE, "lines", indent=15)
    paper.label("values:", words.values(finding), indent=6, hang=9)
    paper.label("cause:", clean(finding.cause), indent=6, hang=9)
    paper.label("means:", clean(finding.happens), indent=6, hang=9)
    paper.label("to fix:", clean(finding.fix), indent=6, hang=9, style="bold green")


def _traces(paper: TerminalText, function: Function) -> None:
    paper.blank_line()
    for fold in folded(function.events):
        event = fold.event
        at = f"at {words.seconds(event.trace.at)}, {words.called(event)}"
        color = "bold yellow" if event.avoidable else "bold"
        paper.label(f"#{event.index}", at, indent=2, hang=5, style=color)
        paper.write(words.why(function, event), indent=7)
        paper.write(words.cost(event), indent=7)
        if event.trace.failed:
            paper.write(f"failed: {clean(event.trace.failed)}", indent=7, style="red")
        paper.write(clean(event.trace.note), indent=7)
        if fold.more:
            line = f"... and {len(fold.more)} more like it, {words.seconds(fold.cost)}"
            last = words.seconds(fold.more[-1].trace.at)
            paper.write(f"{line}, the last at {last}", indent=2)


def _needed(paper: TerminalText, report: Report) -> None:
    functions = without_findings(report)
    if not functions:
        return
    paper.heading("Nothing to change")
    for function in functions[:_MOST_NEEDED]:
        line = f"{_name(function, report)}: {words.how_often(function)}, {words.costs(function)}"
        if function.events and function.events[0].trace.causes:
            line += f": {words.why(function, function.events[0])}"
        paper.label("-", line, indent=2, hang=2, style="")
    _rest(paper, len(functions) - _MOST_NEEDED, "functions", indent=2)


def _small(paper: TerminalText, report: Report) -> None:
    if not report.small:
        return
    paper.heading("Small programs (single operations), by line of your code")
    by_cost = sorted(report.small, key=lambda small: (-small.seconds, -small.count))
    for small in by_cost[:_MOST_SMALL]:
        cost = f"{small.count:>5,} x {words.seconds(small.seconds):>8}"
        names = ", ".join(clean(name) for name in small.names)
        named = f" ({names})" if names else ""
        paper.single_line(f"{cost}  {words.where(small.site)}{named}", indent=2)
    _rest(paper, len(by_cost) - _MOST_SMALL, "lines", indent=2)


def _rest(paper: TerminalText, number: int, of: str, *, indent: int) -> None:
    if number > 0:
        paper.write(f"... and {number} more {of}", indent=indent)


def _notes(paper: TerminalText, report: Report) -> None:
    notes = dict.fromkeys(clean(note.text) for note in report.notes)  # without duplicates
    if notes:
        paper.heading("What doctor could not see")
    for note in notes:
        paper.label("-", note, indent=2, hang=2, style="")


def _versions(paper: TerminalText, report: Report) -> None:
    paper.heading("To paste into an issue")
    known = versions(report)
    hang = max(map(len, known)) + 2
    for name, version in known.items():
        paper.label(name, version, indent=2, hang=hang, style="")
