"""The judge judges: a perfect report passes for every case, and one with any fault does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from .case import Case, Json, Lines, check_again, check_counts, check_found, check_small
from .cases_jax import CASES as JAX
from .cases_tensorflow import CASES as TENSORFLOW
from .cases_torch import CASES as TORCH

pytestmark = pytest.mark.plain
CASES = [*JAX, *TENSORFLOW, *TORCH]


def perfect(case: Case) -> Json:
    """The report that a case asks for."""
    lines = Lines(case.path)
    functions = []
    for name in dict.fromkeys([*case.traces, *case.again]):
        mode, _, model = name.partition(" of ")
        again = case.again.get(name, ())
        events = [
            {
                "avoidable": True,
                "file": str(case.path),
                "line": min(lines.of(a.at)),
                "text": lines.text[min(lines.of(a.at)) - 1],
                "causes": [{"kind": a.cause.split("|")[0], "text": " ".join(a.says)}],
                "what": a.what,
                "via": a.via,
            }
            for a in again
        ]
        functions.append(
            {
                "name": f"{mode} function of model '{model}'" if model else name,
                "keras": bool(model),
                "engine": case.engine,
                "file": str(case.path),
                "line": lines.marked.get(f"def {name}", 1),
                "traces": case.traces.get(name, 1),
                "compilations": case.compilations.get(name, 0),
                "retraces": len(again),
                "events": [{"avoidable": False}, *events],
            }
        )
    findings = [
        {
            "kind": f.kind,
            "function": "",
            "file": str(case.path),
            "line": min(lines.of(f.at)) if f.at else 1,
            "what": f"found {' '.join(f.says)}",
            "happens": "something",
            "fix": "something else",
            "cause": f.cause.split("|")[0],
            "count": f.count,
            "before": f.before,
            "now": f.now,
            "noticed": {"file": str(case.path), "line": min(lines.of(f.noticed))}
            if f.noticed
            else None,
        }
        for f in case.found
    ]
    small = []
    if case.small:
        small = [{"file": str(case.path), "line": min(lines.of(case.small)), "count": 5}]
    return {
        "retraces": sum(map(len, case.again.values())),
        "functions": functions,
        "findings": findings,
        "small": small,
    }


def judge(case: Case, report: Json) -> None:
    check_counts(case, report, {"traces": case.traces, **case.prints})
    check_again(case, report)
    check_found(case, report)
    check_small(case, report)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.script)
def test_a_perfect_report_passes(case: Case) -> None:
    judge(case, perfect(case))


def false_alarm(report: Json) -> None:
    report["findings"].append({"kind": "nonsense", "line": 1, "what": "x"})


def missed_finding(report: Json) -> None:
    del report["findings"][0]


def no_cure(report: Json) -> None:
    report["findings"][0]["fix"] = ""


def one_trace_too_many(report: Json) -> None:
    report["functions"][0]["traces"] += 1


def wrong_line(report: Json) -> None:
    report["functions"][0]["events"][1]["line"] += 1


def wrong_cause(report: Json) -> None:
    report["functions"][0]["events"][1]["causes"][0]["kind"] = "mode"


def argument_not_named(report: Json) -> None:
    report["functions"][0]["events"][1]["causes"][0]["text"] = "something changed"


def extra_retrace(report: Json) -> None:
    report["retraces"] += 1


FAULTS: dict[str, list[Callable[[Json], Any]]] = {
    "tensorflow_shape": [
        false_alarm,
        missed_finding,
        no_cure,
        one_trace_too_many,
        wrong_line,
        wrong_cause,
        argument_not_named,
        extra_retrace,
    ],
    "tensorflow_clean": [false_alarm, one_trace_too_many, extra_retrace],
    "tensorflow_side_random": [false_alarm, missed_finding, no_cure],
}


@pytest.mark.parametrize(
    ("script", "fault"), [(script, f) for script, faults in FAULTS.items() for f in faults]
)
def test_a_report_with_a_fault_does_not_pass(script: str, fault: Callable[[Json], Any]) -> None:
    (case,) = [case for case in CASES if case.script == script]
    report = copy.deepcopy(perfect(case))
    fault(report)

    with pytest.raises(AssertionError):
        judge(case, report)


@pytest.mark.parametrize("part", ["line", "before", "now", "noticed"])
def test_a_stale_value_has_to_be_shown_where_it_is(part: str) -> None:
    (case,) = [case for case in CASES if case.script == "tensorflow_stale_global"]
    report = perfect(case)
    finding = report["findings"][0]
    finding[part] = {"line": 1, "before": "7", "now": "7", "noticed": {}}[part]

    with pytest.raises(AssertionError):
        judge(case, report)
