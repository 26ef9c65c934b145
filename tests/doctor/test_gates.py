"""The command line of doctor: gates and their exit codes, files, and mistakes.

One script runs in a process. The gates read logs, and mistakes stop before a script runs: these tests
call the command here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from trainstep._doctor.command import main
from trainstep._doctor.records import Cause, End, Incident, Log, Start, Trace
from trainstep._explain.causes import FINDINGS

from .running import SCRIPTS, doctor, examined, written

pytestmark = pytest.mark.plain  # the same on every engine


def code_of(*arguments: str | Path) -> int:
    """The exit code of a command that runs no script."""
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    return int(ended.value.code or 0)


def log_of(folder: Path, records: Sequence[Any]) -> Path:
    """A log with these records, of a run that ended well."""
    file = folder / "log.jsonl"
    log = Log(str(file))
    for record in (Start(command=["train.py"]), *records, End()):
        if isinstance(record, Trace):
            log.begin(record)
        log.note(record)
    log.close()
    return file


def traces(number: int, what: str = "trace") -> list[Trace]:
    """Traces of one function, all but the first of them avoidable."""
    first = Trace(engine="jax", group="f", function="f")
    cause = Cause("shape", "x: float32[4] -> float32[5]")
    again = [
        Trace(engine="jax", group="f", function="f", what=what, causes=[cause])
        for _ in range(number - 1)
    ]
    return [first, *again]


def showing(kind: str) -> Sequence[Any]:
    """Records with one finding of a kind."""
    if kind in ("retraces", "compilations"):
        return traces(2, "trace" if kind == "retraces" else "compile")
    return [Incident(kind=kind, engine="jax", function="f", what="a fact", detail="print")]


@pytest.mark.parametrize("kind", FINDINGS)
def test_a_gate_fails_for_its_kind_and_for_no_other(kind: str, tmp_path: Path, capsys: Any) -> None:
    log = log_of(tmp_path, showing(kind))
    others = ",".join(other for other in FINDINGS if other != kind)

    assert code_of("--fail-on", others, "report", log) == 0
    assert code_of("report", log) == 0, "findings without a gate fail nothing"
    assert code_of("--fail-on", kind, "report", log) == 1
    assert f"1 findings of kind {kind}" in capsys.readouterr().err


@pytest.mark.parametrize(("limit", "code"), [(2, 0), (1, 1), (0, 1)])
def test_the_number_of_retraces_can_be_limited(limit: int, code: int, tmp_path: Path) -> None:
    assert code_of("--max-retraces", str(limit), "report", log_of(tmp_path, traces(3))) == code


def test_a_clean_log_passes_every_gate(tmp_path: Path) -> None:
    log = log_of(tmp_path, traces(1))

    assert code_of("--fail-on", ",".join(FINDINGS), "--max-retraces", "0", "report", log) == 0


def test_a_run_writes_json_and_a_page_and_fails_its_gate(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    options = ["--html", page, "--max-retraces", "1"]
    done, report = examined(tmp_path, SCRIPTS / "jax_static.py", options=options)

    assert done.returncode == 1, done.stderr[-2000:]
    assert report["retraces"] == 2
    check_fields(report)
    text = page.read_text()
    assert "<html" in text.lower()
    assert "jax_static.py" in text
    assert 'src="http' not in text
    assert 'href="http' not in text.replace('href="https://github.com', "")


def check_fields(report: dict[str, Any]) -> None:
    """JSON has the fields that are promised."""
    assert report["format"] == 1
    assert report["complete"] is True
    assert report["error"] == ""
    assert any("jax_static.py" in part for part in report["command"])
    assert "jax" in " ".join(report["versions"]).lower()
    assert report["seconds"] >= report["compile_seconds"] >= report["avoidable_seconds"] > 0
    for function in report["functions"]:
        assert set(function) >= {
            "name", "engine", "file", "line", "text", "keras", "calls", "traces", "compilations",
            "retraces", "seconds", "avoidable_seconds", "events", "inner", "fixes",
        }  # fmt: skip
        for index, event in enumerate(function["events"]):
            assert set(event) >= {
                "index", "at", "what", "file", "line", "text", "via", "mode", "avoidable",
                "signature", "nearest", "causes", "seconds", "from_disk", "failed", "note",
            }  # fmt: skip
            phases = set(event["seconds"])  # those that the engine has, or tells of
            assert {"trace", "first_run"} <= phases <= {"trace", "lower", "compile", "first_run"}
            assert bool(event["causes"]) == bool(index), "the first needs no cause, others do"
    times = [event["at"] for function in report["functions"] for event in function["events"]]
    assert all(0 <= at <= report["seconds"] for at in times)
    for finding in report["findings"]:
        assert set(finding) >= {
            "kind", "function", "file", "line", "text", "what", "happens", "fix", "count",
            "seconds", "cause", "before", "now", "noticed", "engine",
        }  # fmt: skip
        assert finding["kind"] in FINDINGS


def test_the_scripts_own_failure_goes_before_a_gates(tmp_path: Path) -> None:
    text = (SCRIPTS / "jax_static.py").read_text() + "\nraise SystemExit(3)\n"
    done = doctor(written(tmp_path, text), options=["--max-retraces", "0"])

    assert done.returncode == 3


def test_what_the_script_contains_cannot_break_the_page(tmp_path: Path) -> None:
    hostile = written(tmp_path, "raise ValueError('<script>alert(1)</script> & </html>')\n")
    page = tmp_path / "page.html"
    doctor(hostile, options=["--html", page])

    assert "<script>alert(1)</script>" not in page.read_text()


def test_files_are_written_where_doctor_was_started(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    moves = written(tmp_path, "import os\nos.chdir('elsewhere')\n")
    options = ["--json", "report.json", "--html", "page.html", "--log", "log.jsonl"]
    done = doctor(moves, options=options, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert {"report.json", "page.html", "log.jsonl"} <= {f.name for f in tmp_path.iterdir()}


# Mistakes: each is reported before the script runs, which would otherwise be lost.


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--fail-on", "retraces,slowness"], ["slowness", *FINDINGS]),
        (["--max-retraces", "many"], ["many"]),
        (["--max-retraces", "-1"], ["must be 0 or more; got: -1"]),
        (["--max-retraces", "1.5"], ["1.5"]),
        (["--json", "missing/report.json"], ["missing", "create it first"]),
    ],
    ids=["kind", "word", "negative", "fraction", "folder"],
)
def test_a_wrong_option_is_named_before_the_script_runs(
    options: list[str], parts: list[str], tmp_path: Path, capfd: Any
) -> None:
    assert code_of(*options, written(tmp_path, "print('ran')")) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert all(part in printed.err for part in parts)


@pytest.mark.parametrize("argv", [["no_such_script.py"], ["report", "no_such_log.jsonl"]])
def test_a_missing_file_is_named(argv: list[str], capfd: Any) -> None:
    assert code_of(*argv) == 2
    assert argv[-1] in capfd.readouterr().err


def test_a_missing_module_is_named(tmp_path: Path) -> None:
    done = doctor("no_such_module", options=["-m"], cwd=tmp_path)

    assert done.returncode != 0
    assert "no_such_module" in done.stderr


def test_a_file_that_is_no_log_is_refused(tmp_path: Path, capfd: Any) -> None:
    assert code_of("report", written(tmp_path, "hello\n", "notes.txt")) == 2
    assert "notes.txt" in capfd.readouterr().err


def test_nothing_to_run_shows_the_usage(capfd: Any) -> None:
    assert code_of() == 2
    assert "usage" in capfd.readouterr().err.lower()
