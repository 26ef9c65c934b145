"""Doctor's advice works: each cure, on a program of its own, does what it is said to do.

Doctor is not needed here. What a cure has to reach is what is needed and no more: `after` is
exact.
"""

from __future__ import annotations

import importlib
import re

import keras
import pytest

from trainstep._explain import causes

from .cure import Cure
from .running import HERE

ENGINE = keras.backend.backend()
KIND = re.compile(r'(?:add|cure)\("([a-z-]+)"')
CURES = [
    *importlib.import_module(f".cures_{ENGINE}", __package__).CURES,
    *importlib.import_module(".cures_keras", __package__).CURES,
]


def marked(cure: Cure) -> object:
    return pytest.param(cure, marks=pytest.mark.slow) if cure.slow else cure


@pytest.mark.parametrize("cure", map(marked, CURES), ids=str)
def test_the_cure_works(cure: Cure) -> None:
    assert cure.run(False) == cure.before
    assert cure.run(True) == cure.after
    assert cure.after < cure.before


@pytest.mark.plain
def test_every_cause_and_every_finding_has_a_cure_that_is_proved() -> None:
    files = sorted(HERE.glob("cures_*.py"))
    proved = {kind for file in files for kind in KIND.findall(file.read_text())}
    said = {*causes.CURES, *causes.FINDINGS}

    # Of these, one trace is needed, doctor knows no cause, or the causes have cures of their own.
    assert said - proved == {"mode", "unknown", "retraces", "compilations"}
