"""Reports made by hand, one for each kind of run, to see how they are shown."""

from __future__ import annotations

from typing import Any

from trainstep._doctor.records import NOWHERE, Cause, Note, Site, Span, Trace
from trainstep._doctor.report import Event, Finding, Function, Report, SmallPrograms
from trainstep._explain.causes import FINDINGS, cure

STEP = Site("train.py", 12, "def train_step(x, y):", "<module>")
CALL = Site("train.py", 41, "loss = train_step(x, y)", "main")
FIT = Site("train.py", 60, "model.fit(x, y, epochs=3, validation_data=(xv, yv))", "main")
VERSIONS = {"python": "3.11.9", "platform": "Linux-x86_64", "keras": "3.15.0", "jax": "0.10.1"}
COSTS = {"trace": 0.3, "lower": 0.02, "compile": 1.2, "first_run": 0.1}


def event(index: int, at: float, *, avoidable: bool = False, **told: Any) -> Event:
    """A trace of `CALL`, unless something else is told."""
    told = {"called": CALL, "number": index, "seconds": dict(COSTS), **told}
    trace = Trace(at=at, **told)
    return Event(index, trace, avoidable, sum(trace.seconds.values()))


def retrace(index: int, at: float, rows: int, **told: Any) -> Event:
    """A trace for another number of rows than the first."""
    change = Cause("shape", f"x: float32[32,4] -> float32[{rows},4]")
    return event(index, at, avoidable=True, **{"causes": [change], "nearest": 1, **told})


def function(*events: Event, name: str = "train_step", **told: Any) -> Function:
    """A function of TensorFlow's, unless something else is told."""
    told = {"engine": "tensorflow", "defined": STEP, "group": name, **told}
    return Function(name=name, events=list(events), **told)


def finding(kind: str, what: str, site: Site = CALL, **told: Any) -> Finding:
    """A finding about `train_step` in the words of `_advice`."""
    advice = FINDINGS[kind]
    told = {"function": "train_step", "happens": advice.happens, "fix": advice.cure, **told}
    told.setdefault("group", told["function"])
    return Finding(kind=kind, site=site, what=what, **told)


def report(*functions: Function, findings: list[Finding] | None = None, **told: Any) -> Report:
    """A run of `train.py` of a minute."""
    told = {"versions": VERSIONS, "command": ["python", "train.py"], "seconds": 60.0, **told}
    return Report(functions=list(functions), findings=findings or [], **told)


def clean() -> Report:
    """Three functions, each traced as often as it has to be."""
    predict = function(event(1, 9.0), event(2, 12.0, mode="no grad"), name="predict", calls=7)
    return report(function(event(1, 0.5), calls=200), function(event(1, 4), name="eval"), predict)


def by_shape() -> Report:
    """Traced four times in eight calls; Keras's own function as well, in validation."""
    first = event(1, 0.5, mode="train")
    step = function(first, *(retrace(i, 2.0 * i, 32 - i) for i in (2, 3, 4)), calls=8)
    step.call_times = [0.5, 2.2, 4, 5, 6, 8, 9, 10]
    step.inner = {"normalize": 4}
    valid = retrace(2, 21, 7, called=FIT, via="validation inside fit", from_disk=True)
    valid.trace.note = "TensorFlow then traced a relaxed version: x float32[None,4]"
    keras = function(event(1, 20, called=FIT, via="fit"), valid, name="test_function", keras=True)
    shapes = "`x` came in 4 shapes"
    found = finding("retraces", shapes, count=3, seconds=4.86, cause="shape")
    found.fix = cure("shape", "tensorflow")
    again = finding("retraces", "`x` came in 2 shapes", FIT, function="test_function", count=1)
    again.fix = cure("shape", keras=True)
    spans = [Span(at=19, what="fit", site=FIT, seconds=30), Span(at=50, what="predict", seconds=4)]
    small = [
        SmallPrograms(Site("train.py", 20 + i, f"x{i} = x + {i}"), {"add": i}, i, i / 10)
        for i in range(1, 9)
    ]
    notes = [Note(text="calls of `train_step` inside other functions are not counted")]
    return report(step, keras, findings=[found, again], spans=spans, small=small, notes=notes)


def stale() -> Report:
    """A number that was frozen into a program, and changed since."""
    found = finding(
        "stale", "`scale` is frozen into the program", Site("train.py", 14, "return x * scale")
    )
    found.before, found.now = "1.0", "2.0"
    found.noticed = Site("train.py", 44, "scale = 2.0")
    return report(function(event(1, 0.5), calls=20), findings=[found])


def side_effects() -> Report:
    """Seven prints in a function, and one eager loop that belongs to none."""
    lines = [Site("train.py", line, f"print({line})") for line in range(15, 22)]
    prints = [finding("side-effects", "`print` ran once", site) for site in lines]
    eager = finding("eager", "a gradient was taken 40 times", CALL, function="", count=40)
    return report(function(event(1, 0.5)), findings=[*prints, eager])


def limit() -> Report:
    """Torch gave up; the finding is not the first of the report."""
    guards = [Cause("number", f"L['step'] == {i}") for i in range(9)]
    events = [event(1, 0.5), *(retrace(i, i, 32 - i, causes=[guards[i]]) for i in range(2, 9))]
    found = [
        finding("retraces", "recompiled 7 times", count=7, seconds=11.3, cause="number"),
        finding("recompile-limit", "recompiled 8 times, which is the limit", CALL),
    ]
    return report(function(*events, engine="torch", calls=90), findings=found)


def graph_breaks() -> Report:
    """A function in three parts."""
    breaks = [
        finding("graph-breaks", "`print` cannot be traced", Site("train.py", 15, "print(loss)")),
        finding("graph-breaks", "data-dependent branch", Site("train.py", 17, "if loss > 1:")),
    ]
    return report(function(event(1, 0.5), engine="torch"), findings=breaks)


def killed() -> Report:
    """Cut off while a function was being compiled; nothing is known of how long the run was."""
    cut = event(2, 9.0, avoidable=True, seconds={}, failed="RESOURCE_EXHAUSTED: Out of memory")
    found = finding("retraces", "traced again, unknown cause")
    return report(function(event(1, 0.5), cut), findings=[found], complete=False, seconds=0.0)


def many() -> Report:
    """Sixty traces of one kind, one of another, and four more functions."""
    other = retrace(61, 58, 7, causes=[Cause("dtype", "x: float32 -> float64")])
    step = function(event(1, 0.5), *(retrace(i, 0.9 * i, i) for i in range(2, 61)), other)
    step.call_times = [i * 0.2 for i in range(1, 300)]
    step.fixes = [cure("shape", "tensorflow"), cure("dtype")]
    found = finding("retraces", "`x` came in 60 shapes", count=59, seconds=95.6, cause="shape")
    found.fix = cure("shape", "tensorflow")
    others = [function(event(1, 5.0 * i), name=f"helper_{i}", engine="jax") for i in range(1, 5)]
    return report(step, *others, findings=[found], seconds=120.0)


def processes() -> Report:
    """The same function in two processes, retraced in one."""
    one = function(event(1, 0.5), retrace(2, 3.0, 9), process=11)
    two = function(event(1, 0.6), process=12)
    found = finding("retraces", "`x` came in 2 shapes", process=11, cause="shape")
    return report(one, two, findings=[found])


def hostile() -> Report:
    """Names and lines that would be markup, or commands to a terminal, if they were not text."""
    site = Site("<b>evil</b>.py", 3, "x = '</pre><script>alert(1)</script>' # [red]\x1b[31m")
    step = function(event(1, 0.5, called=site), retrace(2, 1, 3), name="<script>[bold]f\x07")
    step.defined = site
    step.inner = {"<script>inner": 1}
    found = finding("stale", "`<script>` & [/]", site, function=step.name)
    found.before, found.now, found.fix = "<i>", "'\"><script>", "[link=x]<script>[/link]"
    small = [SmallPrograms(site, {"<script>add": 1}, 1, 0.1)]
    told = {"notes": [Note(text="<script>note [red]")], "error": "<script>Error"}
    spans = [Span(at=1, what="<script>fit", site=site, seconds=1)]
    versions = {"<script>": "<script>1"}
    return report(
        step, findings=[found], small=small, spans=spans, versions=versions,
        command=["python", "<script>.py"], **told,
    )  # fmt: skip


def empty() -> Report:
    """A script that traced nothing."""
    return Report()


def nowhere() -> Report:
    """Nothing is known of where."""
    step = function(event(1, 0.5, called=NOWHERE), defined=NOWHERE)
    return report(step, findings=[finding("leaks", "a tensor got out", NOWHERE)])


ALL = [
    clean, by_shape, stale, side_effects, limit, graph_breaks, killed, many, processes, hostile,
    empty, nowhere,
]  # fmt: skip
