"""What doctor has to say about a script, as a value, and how to check that it did.

Lines are named, not numbered: `# <- call` at the end of a line of a script makes it "call". In
`at`, "read|def soften" stands for either of two lines, where the better one is a matter of taste;
"def NAME" is the first line of a definition, its decorators included. In `causes`, "number|dtype"
is likewise either kind.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .running import SCRIPTS

Json = dict[str, Any]


@dataclass(frozen=True)
class Again:
    """A trace or compilation after the first: the line that asked for it, and why it was made."""

    at: str
    cause: str
    says: tuple[str, ...] = ()  # parts of the causes' texts, taken together
    via: str = ""
    what: str = "trace"


@dataclass(frozen=True)
class Found:
    """A finding. Those of one kind have to lie on the lines expected, all of them and no other."""

    kind: str
    at: str = ""  # empty: on any line
    cause: str = ""
    says: tuple[str, ...] = ()  # parts of what is found, what happens, before and now
    count: int | None = None
    before: str = ""
    now: str = ""
    noticed: str = ""


@dataclass(frozen=True)
class Case:
    """One script on one engine."""

    script: str
    traces: dict[str, int] = field(default_factory=dict)  # by the witness, and so by doctor
    prints: Json = field(default_factory=dict)  # more that the witness says
    compilations: dict[str, int] = field(default_factory=dict)  # without a trace
    again: dict[str, tuple[Again, ...]] = field(default_factory=dict)
    found: tuple[Found, ...] = ()
    may: frozenset[str] = frozenset()  # kinds that are a matter of taste here
    small: str = ""  # a line of operations outside any function
    engine: str = ""  # of the functions named above
    options: tuple[str, ...] = ()  # of doctor
    loose: bool = False  # whether doctor may count other than the witness

    @property
    def path(self) -> Path:
        return SCRIPTS / f"{self.script}.py"

    @property
    def clean(self) -> bool:
        return not self.found


def retraced(function: str, *again: Again, **traces: int) -> dict[str, Any]:
    """The fields of a case in which one function is traced again, all times for one cause."""
    (cause,) = {a.cause for a in again}
    return {
        "traces": {function: len(again) + 1} | traces,
        "again": {function: again},
        "found": (Found("retraces", cause=cause, says=(function.rsplit(" ", maxsplit=1)[-1],)),),
    }


def effects(*lines: str) -> tuple[Found, ...]:
    """Side effects on these lines."""
    return tuple(Found("side-effects", line) for line in lines)


def times(number: int, again: Again) -> tuple[Again, ...]:
    """The same, a number of times."""
    return (again,) * number


class Lines:
    """The lines of a script by their names."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text().splitlines()
        self.marked: dict[str, int] = {}
        for number, line in enumerate(self.text, 1):
            if mark := re.search(r"# <- (.+)$", line):
                assert mark[1] not in self.marked, f"{path.name}: {mark[1]} twice"
                self.marked[mark[1]] = number
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                self.marked.setdefault(f"def {node.name}", first)

    def of(self, names: str) -> set[int]:
        return {self.marked[name] for name in names.split("|")}


def functions_named(report: Json, name: str) -> list[Json]:
    """The functions of a report that the witness calls `name`."""
    if named := re.fullmatch(r"(train|test|predict) of (\w+)", name):
        mode, model = named.groups()
        return [
            f
            for f in report["functions"]
            if f["keras"] and mode in f["name"] and f"'{model}'" in f["name"]
        ]
    named = [(f, f["name"].split(".")[-1].split(" ")) for f in report["functions"]]
    alone = [f for f, words in named if words[0] == name]
    return alone or [f for f, words in named if words[-1] == name]  # `gradient of step`


def check_counts(case: Case, report: Json, witness: Json) -> None:
    """Doctor counts what the witness counts."""
    assert witness["traces"] == case.traces
    assert {k: witness[k] for k in case.prints} == case.prints
    for name, traces in case.traces.items():
        functions = functions_named(report, name)
        assert functions, f"{name} is not in {[f['name'] for f in report['functions']]}"
        if case.loose:
            continue
        assert sum(f["traces"] for f in functions) == traces, name
        assert sum(f["compilations"] for f in functions) == case.compilations.get(name, 0), name
        if case.engine:
            assert {f["engine"] for f in functions} == {case.engine}
        for function in functions:
            if not function["keras"] and name != "<lambda>":
                assert Path(function["file"]) == case.path, name
                assert function["line"] in Lines(case.path).of(f"def {name}"), name


def check_again(case: Case, report: Json) -> None:
    """Every avoidable trace is blamed on the user's line and on its cause, and no other is."""
    lines = Lines(case.path)
    for name, expected in case.again.items():
        functions = functions_named(report, name)
        events = [e for f in functions for e in f["events"] if e["avoidable"]]
        assert len(events) == len(expected), (name, [e["causes"] for e in events])
        assert sum(f["retraces"] for f in functions) == len(expected), name
        for event, again in zip(events, expected, strict=True):
            assert Path(event["file"]) == case.path, event
            assert event["line"] in lines.of(again.at), event
            assert event["text"].strip(), event
            assert event["text"].strip() in lines.text[event["line"] - 1], event
            kinds = {c["kind"] for c in event["causes"]}
            assert len(kinds) == 1, event
            assert kinds <= set(again.cause.split("|")), event
            texts = "; ".join(c["text"] for c in event["causes"])
            assert all(part in texts for part in again.says), (texts, again.says)
            assert event["what"] == again.what, event
            assert event["via"] == again.via, event
    if not case.loose:
        assert report["retraces"] == sum(map(len, case.again.values()))


def check_found(case: Case, report: Json) -> None:
    """Exactly the findings that are expected, at their lines, each with a cure."""
    findings = report["findings"]
    kinds = {f["kind"] for f in findings}
    told = [(f["kind"], f["line"], f["what"]) for f in findings]
    assert {f.kind for f in case.found} <= kinds, told
    assert kinds <= {f.kind for f in case.found} | case.may, told
    lines = Lines(case.path)
    for kind in {f.kind for f in case.found}:
        expected = [f for f in case.found if f.kind == kind]
        here = [f for f in findings if f["kind"] == kind]
        for one in expected:
            match = [f for f in here if fits(one, f, case.path, lines)]
            assert match, f"{one} is not among {here}"
        if all(f.at for f in expected):
            anywhere = set().union(*(lines.of(f.at) for f in expected))
            assert {f["line"] for f in here} <= anywhere, told
    for finding in findings:
        assert finding["what"], finding
        assert finding["happens"], finding
        assert finding["fix"], finding


def fits(one: Found, finding: Json, path: Path, lines: Lines) -> bool:
    """Whether a finding of the report is the one expected."""
    words = " ".join(str(finding[k]) for k in ("function", "what", "happens", "before", "now"))
    noticed = finding["noticed"]
    return all(
        (
            not one.at or (Path(finding["file"]), finding["line"]) in at(path, lines, one.at),
            not one.cause or finding["cause"] in one.cause.split("|"),
            all(part in words for part in one.says),
            one.count is None or finding["count"] == one.count,
            one.before in str(finding["before"]),
            one.now in str(finding["now"]),
            not one.noticed
            or (
                noticed and (Path(noticed["file"]), noticed["line"]) in at(path, lines, one.noticed)
            ),
        )
    )


def at(path: Path, lines: Lines, names: str) -> set[tuple[Path, int]]:
    return {(path, line) for line in lines.of(names)}


def check_small(case: Case, report: Json) -> None:
    """Operations outside any function are summed by the line that they stand on."""
    if case.small:
        (line,) = Lines(case.path).of(case.small)
        small = [s for s in report["small"] if (Path(s["file"]), s["line"]) == (case.path, line)]
        assert len(small) == 1, report["small"]
        assert small[0]["count"] >= 5
