"""The timeline of a run: one lane per function and per Keras method, time from left to right.

Positions are in percent, so the picture scales with the window while its text does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from trainstep._doctor.records import Span
from trainstep._doctor.report import Event, Function, Report
from trainstep._doctor.show import words
from trainstep._doctor.show.grouping import processes
from trainstep._doctor.show.html import Markup, joined, tag

_LANES = 24  # functions shown
_LANE = 44  # pixels
_AXIS = 24
_MARKS = 6  # on the time axis, at most
_STEPS = 400  # distinguishable positions along the axis
_NAME = 48


def timeline(report: Report) -> Markup:
    """The timeline; empty if there were no traces."""
    end = _end(report)
    functions = [function for function in report.functions if function.events][:_LANES]
    if not end or not functions:
        return joined()
    several = len(processes(report)) > 1
    lanes = [*_span_lanes(report.spans, end)]
    lanes += [_function_lane(function, end, several) for function in functions]
    height = len(lanes) * _LANE + _AXIS
    placed = [
        tag("svg", lane, y=number * _LANE, width="100%", height=_LANE)
        for number, lane in enumerate(lanes)
    ]
    picture = tag(
        "svg",
        *_axis(end, height),
        *placed,
        width="100%",
        height=height,
        role="img",
        aria_label="Timeline of traces and compilations; the tables below have the same data.",
    )
    left = sum(bool(function.events) for function in report.functions) - len(functions)
    more = tag("p", f"... and {words.count(left, 'more function')}") if left else ""
    return joined(_legend(report), tag("div", picture, class_="timeline"), more)


def _end(report: Report) -> float:
    """The time of the last record; a run that was cut off has no recorded length."""
    traced = [e.trace.at + e.cost for f in report.functions for e in f.events]
    called = [at for f in report.functions for at in f.call_times]
    return max(report.seconds, *traced, *called, *(s.at + s.seconds for s in report.spans), 0.0)


def _legend(report: Report) -> Markup:
    kinds = {"needed": "needed", "avoidable": "avoidable"}
    if any(event.trace.from_disk for function in report.functions for event in function.events):
        kinds["disk"] = "from disk cache"
    if any(function.call_times for function in report.functions):
        kinds["call"] = "call"
    if report.spans:
        kinds["span"] = "Keras method"
    items = [
        tag("li", tag("span", class_=f"swatch {kind}", aria_hidden="true"), f" {text}")
        for kind, text in kinds.items()
    ]
    return tag("ul", *items, class_="legend")


def _axis(end: float, height: int) -> Iterator[Markup]:
    step = _step(end)
    for number in range(math.floor(end / step + 1e-9) + 1):
        at = number * step
        place = _percent(at, end)
        anchor = "start" if not number else "end" if at / end > 0.95 else "middle"
        yield tag("rect", x=place, y=0, width=1, height=height - _AXIS, class_="grid")
        label = f"{at:g} s"
        yield tag("text", label, x=place, y=height - 7, text_anchor=anchor, class_="axis")


def _step(end: float) -> float:
    """A round interval in seconds that needs few marks."""
    power = 10.0 ** math.floor(math.log10(end / _MARKS))
    return next(power * times for times in (1, 2, 5, 10) if end / (power * times) <= _MARKS)


def _function_lane(function: Function, end: float, several: bool) -> Markup:
    name = words.clean(function.name)
    name = name if len(name) <= _NAME else name[: _NAME - 3] + "..."
    process = f", process {function.process}" if several else ""
    label = f"{name}: {words.how_often(function)}{process}"
    calls = (
        tag("rect", x=place, y=34, width=1, height=6, class_="call")
        for place in _places(function.call_times, end)
    )
    # Avoidable ones are drawn last and higher: none is hidden, and height repeats the colour.
    ordered = sorted(function.events, key=lambda event: event.avoidable)
    bars = (_bar(function, event, end) for event in ordered)
    return joined(tag("text", label, x=0, y=13, class_="lane"), *calls, *bars)


def _bar(function: Function, event: Event, end: float) -> Markup:
    trace = event.trace
    kind = "avoidable" if event.avoidable else "needed"
    title = "\n".join(
        (
            f"{words.clean(function.name)} #{event.index} at {words.seconds(trace.at)}, {kind}",
            words.why(function, event),
            words.cost(event),
            words.called(event),
        )
    )
    top = 18 if event.avoidable else 23
    return tag(
        "rect",
        tag("title", title),
        x=_percent(trace.at, end),
        y=top,
        width=_percent(event.cost, end),
        height=32 - top,
        class_=f"{kind} disk" if trace.from_disk else kind,
    )


def _span_lanes(spans: Iterable[Span], end: float) -> Iterator[Markup]:
    """A lane per method; of calls at the same position, only the longest."""
    methods: dict[str, dict[str, Span]] = {}
    for span in spans:
        positions = methods.setdefault(span.what, {})
        place = _percent(round(span.at / end * _STEPS) * end / _STEPS, end)
        positions[place] = max(positions.get(place, span), span, key=lambda each: each.seconds)
    for method, placed in methods.items():
        bars = [_span(span, end) for span in placed.values()]
        yield joined(tag("text", words.clean(method), x=0, y=13, class_="lane"), *bars)


def _span(span: Span, end: float) -> Markup:
    title = f"{words.clean(span.what)} at {words.seconds(span.at)}, {words.seconds(span.seconds)}"
    return tag(
        "rect",
        tag("title", f"{title}\n{words.where(span.site)}"),
        x=_percent(span.at, end),
        y=20,
        width=_percent(span.seconds, end),
        height=10,
        class_="span",
    )


def _places(times: Iterable[float], end: float) -> list[str]:
    steps = dict.fromkeys(round(at / end * _STEPS) for at in times)
    return [_percent(step, _STEPS) for step in steps]


def _percent(part: float, whole: float) -> str:
    return f"{min(max(part / whole, 0), 1) * 100:.2f}%"
