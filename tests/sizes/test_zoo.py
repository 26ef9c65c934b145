"""Every case of the zoo, at sizes that vary: the same numbers as at its exact shapes, or a refusal
that was expected and says why.
"""

from __future__ import annotations

import keras
import pytest

import trainstep as ts

from .judge import Size, judge
from .zoo import CASES, Case

ENGINE = keras.backend.backend()

# Each size costs JAX a program at its exact shape. One row is a size of its own kind: Keras and JAX
# ask whether a size is one, to broadcast.
SIZES: dict[str, tuple[Size, ...]] = {
    "jax": ((5, 7), (11, 12), (1, 4)),
    "tensorflow": ((5, 7), (11, 12), (16, 16), (1, 4)),
    "torch": ((5, 7), (11, 12), (16, 16), (1, 4)),
}

pytestmark = pytest.mark.skipif(
    not hasattr(ts, "Shapes"), reason="sizes that vary are not part of this version"
)


@pytest.mark.parametrize(
    "case", [case for case in CASES.values() if ENGINE in case.engines], ids=lambda case: case.name
)
def test_sizes_that_vary_give_the_numbers_of_exact_shapes(case: Case) -> None:
    verdict = judge(case, SIZES[ENGINE])

    assert verdict.outcome == case.expects(ENGINE), verdict
    assert case.reasons.get(ENGINE, "").lower() in verdict.why.lower(), verdict
