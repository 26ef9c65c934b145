"""Every script of the corpus under doctor: counts as the witness's, causes, lines and findings
exactly as expected, and none where there is nothing to find.

Each costs a process and an import: a sample is run, with all clean ones. `TRAINSTEP_CORPUS=all` runs
all of them, and every script alone as well, to see that the witness tells the same without doctor: do
so after every change of a hook, and on every new release of an engine.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import keras
import pytest

from .case import Case, check_again, check_counts, check_found, check_small
from .cases_flax import CASES as FLAX
from .cases_jax import CASES as JAX
from .cases_tensorflow import CASES as TENSORFLOW
from .cases_torch import CASES as TORCH
from .running import SCRIPTS, Completed, examined, python

ENGINE = keras.backend.backend()
CASES = {"jax": JAX, "tensorflow": TENSORFLOW, "torch": TORCH}
ALL = os.environ.get("TRAINSTEP_CORPUS") == "all"
EVERY = 6 if ENGINE == "tensorflow" else 3  # where an import takes longest
IN_CI = os.environ.get("TRAINSTEP_TESTS") == "shared"  # where all of the tools are there
WITHOUT = [name for name in ("flax", "optax") if importlib.util.find_spec(name) is None]
SAMPLE = [case for i, case in enumerate(CASES[ENGINE]) if ALL or not i % EVERY or case.clean]
ALONE = [*CASES[ENGINE], *(FLAX if ENGINE == "jax" and not WITHOUT else ())]


def witness_of(done: Completed) -> dict:
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.script)
def test_doctor_says_what_happened_and_why(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.skipif(ENGINE != "jax", reason="Flax is JAX's")
@pytest.mark.skipif(bool(WITHOUT) and not IN_CI, reason="needs Flax: pip install flax optax")
@pytest.mark.parametrize("case", FLAX, ids=lambda case: case.script)
def test_doctor_says_what_happened_with_flax_and_why(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


def check(case: Case, tmp_path: Path) -> None:
    """Runs a script under doctor and looks at everything that it says."""
    done, report = examined(tmp_path, case.path, options=case.options)

    assert done.returncode == 0, done.stderr[-4000:]
    assert report["complete"]
    assert not report["error"]
    check_counts(case, report, witness_of(done))
    check_again(case, report)
    check_found(case, report)
    check_small(case, report)
    assert done.stderr.strip(), "no report in words"


@pytest.mark.skipif(not ALL, reason="TRAINSTEP_CORPUS=all")
@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.script)
def test_the_witness_tells_the_same_without_doctor(case: Case) -> None:
    done = python(case.path)

    assert done.returncode == 0, done.stderr[-4000:]
    told = witness_of(done)
    assert told["traces"] == case.traces
    assert {k: told[k] for k in case.prints} == case.prints


def test_every_script_is_judged_on_every_engine_that_it_is_for() -> None:
    everywhere = {**CASES, "flax": FLAX}
    for engine, cases in everywhere.items():
        names = [case.script for case in cases]
        assert len(set(names)) == len(names)
        ours = {f.stem for f in SCRIPTS.glob(f"{engine}_*.py")}
        assert ours <= set(names)
    judged = {case.script for cases in everywhere.values() for case in cases}
    assert judged == {f.stem for f in SCRIPTS.glob("*.py")}


def test_clean_scripts_expect_nothing() -> None:
    for cases in (*CASES.values(), FLAX):
        for case in cases:
            if "_clean" in case.script:
                assert case.clean, case.script
                assert not case.again, case.script
