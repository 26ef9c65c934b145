"""Every script of the corpus under doctor: counts equal the witness's, causes, lines and findings are
exactly the expected ones, and clean scripts have none.

Each script runs in this process, and in a process of its own, which is slow: an engine is imported
each time. `TRAINSTEP_CORPUS=all` also runs every script without doctor, to see that the witness
counts the same: do so after every change of a hook, and on every new release of an engine.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest

from .case import Case, check_again, check_counts, check_found, check_small
from .cases_flax import CASES as FLAX
from .cases_jax import CASES as JAX
from .cases_tensorflow import CASES as TENSORFLOW
from .cases_torch import CASES as TORCH
from .running import SCRIPTS, examined, examined_here, python

ENGINE = keras.backend.backend()
CASES = {"jax": JAX, "tensorflow": TENSORFLOW, "torch": TORCH}
ALL = os.environ.get("TRAINSTEP_CORPUS") == "all"
WITHOUT = [name for name in ("flax", "optax") if importlib.util.find_spec(name) is None]
WITH_FLAX = ENGINE == "jax" and not WITHOUT
EVERY = [*CASES[ENGINE], *(FLAX if WITH_FLAX else ())]
# JAX has a second device, and TensorFlow logs XLA's compilations, only in a process of their own.
APART = {"jax": "jax_sharding", "tensorflow": "tensorflow_keras_xla", "torch": "torch_shape"}[
    ENGINE
]
HERE = [case for case in EVERY if case.script != APART or ENGINE == "torch"]
# They compile much for what they add; in a process of its own, each script is slow.
LONG = {
    "jax": {
        "flax_clean_linen",
        "flax_clean_nnx",
        "flax_eager",
        "flax_jit_in_loop",
        "flax_short_batch",
        "flax_stale_state",
        "flax_structure",
        "jax_clean",
        "keras_clean",
        "keras_clean_frozen_early",
        "keras_clean_gan",
        "keras_validation",
        "keras_variables",
    },
    "tensorflow": {"keras_clean_gan", "tensorflow_variables_keras"},
    "torch": set(),
}[ENGINE]


def marked(cases: list[Case], slow: Callable[[Case], bool]) -> list[Any]:
    """The cases as parameters; those for which `slow` is true are marked."""
    marks = {True: (pytest.mark.slow,), False: ()}
    return [pytest.param(case, marks=marks[slow(case)], id=case.script) for case in cases]


@pytest.mark.parametrize("case", marked(HERE, lambda case: case.script in LONG))
def test_doctor_says_what_happened_and_why(case: Case) -> None:
    printed, report = examined_here(case.path, small=bool(case.small))

    check(case, printed, report)


@pytest.mark.slow
@pytest.mark.parametrize("case", marked(EVERY, lambda case: case.script != APART))
def test_doctor_says_the_same_of_a_process(case: Case, tmp_path: Path) -> None:
    done, report = examined(tmp_path, case.path, options=case.options)

    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.strip(), "no report in words"
    check(case, done.stdout, report)


def check(case: Case, printed: str, report: dict[str, Any]) -> None:
    """Compares the whole report with the case."""
    assert report["complete"]
    assert not report["error"]
    check_counts(case, report, json.loads(printed.splitlines()[-1]))
    check_again(case, report)
    check_found(case, report)
    check_small(case, report)


@pytest.mark.slow
@pytest.mark.skipif(not ALL, reason="TRAINSTEP_CORPUS=all")
@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.script)
def test_the_witness_tells_the_same_without_doctor(case: Case) -> None:
    done = python(case.path)

    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["traces"] == case.traces
    assert {k: told[k] for k in case.prints} == case.prints


@pytest.mark.plain
def test_every_script_is_judged_on_every_engine_that_it_is_for() -> None:
    everywhere = {**CASES, "flax": FLAX}
    for engine, cases in everywhere.items():
        names = [case.script for case in cases]
        assert len(set(names)) == len(names)
        ours = {f.stem for f in SCRIPTS.glob(f"{engine}_*.py")}
        assert ours <= set(names)
    judged = {case.script for cases in everywhere.values() for case in cases}
    assert judged == {f.stem for f in SCRIPTS.glob("*.py")}


@pytest.mark.plain
def test_clean_scripts_expect_nothing() -> None:
    for cases in (*CASES.values(), FLAX):
        for case in cases:
            if "_clean" in case.script:
                assert case.clean, case.script
                assert not case.again, case.script
