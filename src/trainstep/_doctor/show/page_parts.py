"""The sections of a page: each function turns a part of the report into HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trainstep._doctor.report import Event, Finding, Function, Report
from trainstep._doctor.show import words
from trainstep._doctor.show.grouping import (
    Fold,
    Section,
    folded,
    grouped_by_text,
    processes,
    sections,
)
from trainstep._doctor.show.html import Markup, coded, joined, tag
from trainstep._doctor.show.source_lines import sources
from trainstep._doctor.show.summary import alarms, headline, programs, share, state, versions

_OPEN = 8  # rows of traces that are shown unfolded


def head(report: Report) -> Markup:
    """The head of the page: alarms, headline, numbers."""
    return joined(
        *(tag("p", coded(alarm), class_="alarm", role="alert") for alarm in alarms(report)),
        tag("p", headline(report)[0], class_="headline"),  # the cards show the rest
        tag("p", state(report), class_="state") if state(report) else "",
        _numbers(report),
    )


def _numbers(report: Report) -> Markup:
    numbers = {
        "avoidable": words.seconds(report.avoidable_seconds),
        "tracing and compiling": words.seconds(report.compile_seconds),
        "of the run": share(report),
        "traces and compilations": f"{programs(report):,}",
    }
    for number, noun in ((len(report.functions), "function"), (len(report.findings), "finding")):
        numbers[noun if number == 1 else f"{noun}s"] = f"{number:,}"
    cards = [tag("div", tag("dt", name), tag("dd", text)) for name, text in numbers.items() if text]
    return tag("dl", *cards, class_="numbers")


def findings(report: Report, prefix: str) -> Markup:
    """The findings, by function."""
    return joined(*(_section(report, section, prefix) for section in sections(report)))


def _section(report: Report, section: Section, prefix: str) -> Markup:
    function = section.function
    if function is None:
        name = tag("code", words.clean(section.name)) if section.name else "The script"
        title, often = tag("h3", name), joined()
    else:
        link = tag(
            "a", tag("code", words.clean(function.name)), href=_link(report, function, prefix)
        )
        title = tag("h3", link)
        often = tag("p", f"{words.how_often(function)}: {words.costs(function)}")
    articles = [_finding(group) for group in grouped_by_text(section.findings)]
    fixes = [tag("p", tag("b", "Also to fix: "), coded(fix), class_="fix") for fix in section.fixes]
    return tag("section", title, often, *articles, *fixes)


def _finding(group: Sequence[Finding]) -> Markup:
    finding = group[0]
    level, badge = words.severity(finding.kind)
    extent = words.extent(finding)
    labelled = {
        "values": words.values(finding),
        "cause": finding.cause,
        "means": finding.happens,
        "to fix": finding.fix,
    }
    pairs = [
        tag(
            "div",
            tag("dt", name),
            tag("dd", coded(text)),
            class_="fix" if name == "to fix" else None,
        )
        for name, text in labelled.items()
        if text
    ]
    return tag(
        "article",
        tag(
            "h4",
            tag("span", badge, class_=f"badge {level}"),
            " ",
            tag("code", f"{finding.kind}:"),
            " ",
            coded(finding.what),
            tag("small", f" ({extent})") if extent else "",
        ),
        sources([each.site for each in group]),
        tag("dl", *pairs),
        class_=f"finding {level}",
    )


def functions(report: Report, prefix: str) -> Markup:
    """A table of all functions, then the traces of each."""
    headings = ("function", "engine", "defined", "traces", "calls", "seconds", "avoidable")
    rows = [_row(report, function, prefix) for function in report.functions]
    details = [_traces(report, function, prefix) for function in report.functions]
    return joined(table("functions", headings, rows), *details)


def _row(report: Report, function: Function, prefix: str) -> Sequence[str]:
    process = f" (process {function.process})" if len(processes(report)) > 1 else ""
    link = tag("a", words.clean(function.name), href=_link(report, function, prefix))
    return (
        joined(link, process, " (made by Keras)" if function.keras else ""),
        function.engine,
        words.place(function.defined) if function.defined.file else "",
        f"{len(function.events):,}",
        "" if function.calls is None else f"{function.calls:,}",
        words.seconds(function.seconds),
        words.seconds(function.avoidable_seconds) if function.retraces else "",
    )


def _traces(report: Report, function: Function, prefix: str) -> Markup:
    folds = folded(function.events)
    inner = (f"{words.clean(name)} {words.times(n)}" for name, n in function.inner.items())
    inside = tag("p", f"Traced inside it: {', '.join(inner)}.") if function.inner else ""
    more = [_more(function, fold) for fold in folds if fold.more]
    name = words.clean(function.name)
    return tag(
        "details",
        tag("summary", tag("code", name), f": {words.how_often(function)}"),
        inside,
        _events(function, [fold.event for fold in folds]),
        *more,
        id=_link(report, function, prefix)[1:],
        open=bool(function.retraces) and len(folds) <= _OPEN,
    )


def _more(function: Function, fold: Fold) -> Markup:
    summary = f"{len(fold.more)} more like #{fold.event.index}, {words.seconds(fold.cost)}"
    return tag("details", tag("summary", summary), _events(function, fold.more))


def _events(function: Function, events: Iterable[Event]) -> Markup:
    rows = [
        (
            f"#{event.index}",
            tag("span", words.seconds(event.trace.at), class_="time"),
            joined(*_why(function, event)),
            words.cost(event),
            coded(words.called(event)),
        )
        for event in events
    ]
    name = f"traces of {words.clean(function.name)}"
    return table(name, ("#", "at", "why", "seconds", "called at"), rows)


def _why(function: Function, event: Event) -> Iterable[Markup]:
    kind = "avoidable" if event.avoidable else "needed"
    yield tag("span", class_=f"swatch {kind}", role="img", aria_label=kind)
    yield joined(" ", coded(words.why(function, event)))
    if event.trace.failed:
        yield tag("div", f"failed: {event.trace.failed}", class_="failed")
    if event.trace.note:
        yield tag("div", coded(event.trace.note))


def small(report: Report) -> Markup:
    """The small programs, by user line."""
    by_cost = sorted(report.small, key=lambda each: (-each.seconds, -each.count))
    rows = []
    for each in by_cost:
        names = ", ".join(f"{name} {often}" for name, often in each.names.items())
        rows.append(
            (coded(words.where(each.site)), f"{each.count:,}", words.seconds(each.seconds), names)
        )
    return table("small programs", ("your line", "programs", "seconds", "operations"), rows)


def notes(report: Report) -> Markup:
    """The limits of the report, without duplicates."""
    texts = dict.fromkeys(note.text for note in report.notes)
    return tag("ul", *(tag("li", coded(note)) for note in texts))


def issue(report: Report) -> Markup:
    """The versions, to paste into an issue."""
    known = versions(report)
    width = max(map(len, known)) + 2
    lines = "\n".join(f"{name:<{width}}{version}" for name, version in known.items())
    return tag("pre", lines, class_="versions", tabindex=0, aria_label="versions")


def table(name: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """A table. Each cell repeats its heading, for narrow windows that hide the headings."""
    first = tag("tr", *(tag("th", heading, scope="col") for heading in headings))
    body = [
        tag("tr", *(_cell(heading, cell) for heading, cell in zip(headings, row, strict=True)))
        for row in rows
    ]
    whole = tag("table", tag("thead", first), tag("tbody", *body))
    return tag("div", whole, class_="scroll", role="region", tabindex=0, aria_label=name)


def _cell(heading: str, cell: str) -> Markup:
    return tag("td", cell, data_label=heading) if cell else tag("td")


def _link(report: Report, function: Function, prefix: str) -> str:
    number = next(i for i, each in enumerate(report.functions) if each is function)
    return f"#{prefix}function-{number}"
