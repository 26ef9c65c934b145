"""Doctor's advice works: each cure, on a program of its own, does what it is said to do.

Doctor is not needed here. What a cure has to reach is what is needed and no more: `after` is
exact.
"""

from __future__ import annotations

import importlib

import keras
import pytest

from .cure import Cure

ENGINE = keras.backend.backend()
CURES = [
    *importlib.import_module(f".cures_{ENGINE}", __package__).CURES,
    *importlib.import_module(".cures_keras", __package__).CURES,
]


@pytest.mark.parametrize("cure", CURES, ids=str)
def test_the_cure_works(cure: Cure) -> None:
    assert cure.run(False) == cure.before
    assert cure.run(True) == cure.after
    assert cure.after < cure.before
