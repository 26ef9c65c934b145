"""Cases of the zoo, at sizes that vary: the same numbers as at their exact shapes, or a refusal
that was expected and says why.

There are many cases, and each costs several compilations. The suite takes some at few sizes;
`TRAINSTEP_ZOO=all` takes all of them at all sizes: run it on every new release of an engine.
"""

from __future__ import annotations

import os

import keras
import pytest

from .judge import Size, judge
from .zoo import CASES, Case

ENGINE = keras.backend.backend()
ALL = os.environ.get("TRAINSTEP_ZOO") == "all"
EVERY = 1 if ALL else 12
CHOSEN = [case for case in CASES.values() if ENGINE in case.engines][::EVERY]

# Each size costs JAX a program at its exact shape. One row is a size of its own kind: Keras and JAX
# ask whether a size is one, to broadcast.
SIZES: tuple[Size, ...] = ((5, 7), (11, 12), (16, 16), (1, 4), (2, 3), (13, 16))
if not ALL:
    SIZES = ((5, 7),) if ENGINE == "jax" else ((5, 7), (11, 12))


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_sizes_that_vary_give_the_numbers_of_exact_shapes(case: Case) -> None:
    verdict = judge(case, SIZES)

    assert verdict.outcome == case.expects(ENGINE), verdict
    assert case.reasons.get(ENGINE, "").lower() in verdict.why.lower(), verdict
