"""What doctor is told on its command line: gates and their exit codes, files, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import keras
import pytest

from .running import SCRIPTS, doctor, examined, written

ENGINE = keras.backend.backend()
# A process for each, and the same on every engine but for the script: once is enough.
pytestmark = pytest.mark.skipif(ENGINE != "jax", reason="on one engine")
KINDS = (
    "recompile-limit",
    "retraces",
    "compilations",
    "frozen",
    "metrics",
    "stale",
    "side-effects",
    "leaks",
    "eager",
    "graph-breaks",
)
SHOWING = {
    "jax": {
        "retraces": "jax_dtype",
        "compilations": "jax_sharding",
        "stale": "jax_stale_global",
        "side-effects": "jax_side_effects",
        "leaks": "jax_leak",
        "eager": "jax_eager",
        "frozen": "keras_frozen",
    },
    "tensorflow": {
        "retraces": "tensorflow_relaxed",
        "compilations": "tensorflow_hidden_xla",
        "metrics": "tensorflow_metrics_cold",
        "stale": "tensorflow_stale_global",
        "side-effects": "tensorflow_side_random",
        "leaks": "tensorflow_leak",
        "eager": "tensorflow_eager",
        "frozen": "keras_frozen",
    },
    "torch": {
        "retraces": "torch_dtype",
        "recompile-limit": "torch_limit",
        "graph-breaks": "torch_print",
        "eager": "torch_eager",
    },
}[ENGINE]
THREE = {"jax": "jax_static", "tensorflow": "tensorflow_dtype", "torch": "torch_dtype"}[ENGINE]
CLEAN = {"jax": "jax_clean", "tensorflow": "tensorflow_clean_nested", "torch": "torch_clean"}[
    ENGINE
]


def script(name: str) -> Path:
    return SCRIPTS / f"{name}.py"


@pytest.mark.parametrize("kind", SHOWING)
def test_a_kind_that_was_found_fails_the_gate(kind: str) -> None:
    done = doctor(script(SHOWING[kind]), options=["--fail-on", kind])

    assert done.returncode == 1, done.stderr[-2000:]
    assert kind in done.stderr


def test_a_kind_that_was_not_found_lets_the_gate_pass() -> None:
    others = ",".join(kind for kind in KINDS if kind != "retraces")
    done = doctor(script(SHOWING["retraces"]), options=["--fail-on", others])

    assert done.returncode == 0, done.stderr[-2000:]


def test_a_clean_script_passes_every_gate() -> None:
    done = doctor(script(CLEAN), options=["--fail-on", ",".join(KINDS), "--max-retraces", "0"])

    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(("limit", "code"), [(2, 0), (1, 1), (0, 1)])
def test_the_number_of_retraces_can_be_limited(limit: int, code: int, tmp_path: Path) -> None:
    done, report = examined(tmp_path, script(THREE), options=["--max-retraces", str(limit)])

    assert report["retraces"] == 2
    assert done.returncode == code, done.stderr[-2000:]


def test_findings_without_a_gate_fail_nothing() -> None:
    assert doctor(script(THREE)).returncode == 0


def test_the_scripts_own_failure_goes_before_a_gates(tmp_path: Path) -> None:
    text = script(THREE).read_text() + "\nraise SystemExit(3)\n"
    done = doctor(written(tmp_path, text), options=["--max-retraces", "0"])

    assert done.returncode == 3


def test_a_page_is_written_that_needs_no_network(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = doctor(script(THREE), options=["--html", page])

    assert done.returncode == 0, done.stderr[-2000:]
    text = page.read_text()
    assert "<html" in text.lower()
    assert f"{THREE}.py" in text
    assert 'src="http' not in text
    assert 'href="http' not in text.replace('href="https://github.com', "")


def test_what_the_script_contains_cannot_break_the_page(tmp_path: Path) -> None:
    hostile = written(tmp_path, "raise ValueError('<script>alert(1)</script> & </html>')\n")
    page = tmp_path / "page.html"
    doctor(hostile, options=["--html", page])

    assert "<script>alert(1)</script>" not in page.read_text()


def test_json_has_the_fields_that_are_promised(tmp_path: Path) -> None:
    _, report = examined(tmp_path, script(THREE))

    assert report["format"] == 1
    assert report["complete"] is True
    assert report["error"] == ""
    assert any(f"{THREE}.py" in part for part in report["command"])
    assert ENGINE in " ".join(report["versions"]).lower()
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
        assert finding["kind"] in KINDS


def test_files_are_written_where_doctor_was_started(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    moves = written(tmp_path, "import os\nos.chdir('elsewhere')\n")
    options = ["--json", "report.json", "--html", "page.html", "--log", "log.jsonl"]
    done = doctor(moves, options=options, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert {"report.json", "page.html", "log.jsonl"} <= {f.name for f in tmp_path.iterdir()}


# Mistakes.


def test_an_unknown_kind_is_a_mistake_that_names_the_kinds(tmp_path: Path) -> None:
    done = doctor(written(tmp_path, "print('ran')"), options=["--fail-on", "retraces,slowness"])

    assert done.returncode == 2
    assert done.stdout == ""
    assert "slowness" in done.stderr
    assert all(kind in done.stderr for kind in KINDS)


@pytest.mark.parametrize("limit", ["many", "-1", "1.5"])
def test_a_limit_that_is_no_count_is_a_mistake(limit: str, tmp_path: Path) -> None:
    done = doctor(written(tmp_path, "print('ran')"), options=["--max-retraces", limit])

    assert done.returncode == 2
    assert done.stdout == ""
    assert limit in done.stderr


@pytest.mark.parametrize("argv", [["no_such_script.py"], ["report", "no_such_log.jsonl"]])
def test_a_missing_file_is_named_without_a_traceback(argv: list[str], tmp_path: Path) -> None:
    done = doctor(*argv, cwd=tmp_path)

    assert done.returncode in (1, 2)
    assert argv[-1] in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_module_is_named(tmp_path: Path) -> None:
    done = doctor("no_such_module", options=["-m"], cwd=tmp_path)

    assert done.returncode != 0
    assert "no_such_module" in done.stderr


def test_a_file_that_is_no_log_is_refused(tmp_path: Path) -> None:
    done = doctor("report", written(tmp_path, "hello\n", "notes.txt"))

    assert done.returncode in (1, 2)
    assert "notes.txt" in done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_to_run_shows_the_usage() -> None:
    done = doctor()

    assert done.returncode == 2
    assert "usage" in done.stderr.lower()


def test_a_folder_for_the_report_that_does_not_exist_is_said_before_the_run(tmp_path: Path) -> None:
    ran = written(tmp_path, "print('ran')")
    done = doctor(ran, options=["--json", tmp_path / "missing" / "report.json"])

    assert done.returncode == 2
    assert done.stdout == "", "an hour of training would have been lost"
    assert "missing" in done.stderr


def test_a_report_can_be_read_back_as_json(tmp_path: Path) -> None:
    _, report = examined(tmp_path, script(CLEAN))

    assert json.loads(json.dumps(report)) == report
    assert report["findings"] == []
    assert report["retraces"] == 0
