"""Steps that ask odd things of sizes, or compute with them: the numbers of the exact shapes, always.

Each was served wrongly, or crashed, in some version: by a program for sizes that vary whose record
had answered the question for another size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import trainstep as ts
from trainstep.testing import filling

SIZES = (16, 5, 6, 7, 15, 3)
STEPS: dict[str, Callable[[Any], Any]] = {
    "odd": lambda x: ops.sum(x[:-1]) if x.shape[0] % 2 else ops.sum(x),
    "odd length": lambda x: ops.sum(x[:-1]) if len(x) % 2 else ops.sum(x),
    "by its length": lambda x: ops.sum(x) / len(x),
    "not a multiple": lambda x: ops.sum(x) * (2.0 if not x.shape[0] % 3 else 1.0),
    "and, or": lambda x: ops.sum(x) * (((x.shape[0] - 5) and 3.0) or 1.0),
    "equal to a NumPy integer": lambda x: ops.sum(x) * (2.0 if x.shape[0] == np.int64(5) else 1.0),
    "equal to a float": lambda x: ops.sum(x) * (2.0 if x.shape[0] == 5.0 else 1.0),
    "in an array": lambda x: ops.sum(x) * (2.0 if x.shape[0] in np.array([5, 7]) else 1.0),
    "in a list": lambda x: ops.sum(x) * (2.0 if x.shape[0] in [5, 7] else 1.0),
    "shape of another": lambda x: ops.sum(x) * (2.0 if x.shape == (5, 2) else 1.0),
    "filled up to 16": lambda x: ops.sum(ops.concatenate([x, ops.ones((16 - x.shape[0], 2))])),
    "filled up to a multiple": lambda x: ops.sum(
        ops.concatenate([x, ops.ones((-x.shape[0] % 4, 2))])
    ),
    "the rest": lambda x: ops.sum(x[x.shape[0] // 4 * 4 :]),
    "ones of the rest": lambda x: ops.sum(x) + ops.sum(ops.ones((x.shape[0] % 4, 2))),
    "rolled past the end": lambda x: ops.sum(ops.roll(x, 20, axis=0)[:2]),
    "in pieces": lambda x: ops.sum(ops.array_split(x, 2, axis=0)[0]),
    "gradient of a place past the end": lambda x: ts.grad(
        lambda y: ops.sum(ops.take(y, ops.convert_to_tensor([0, 1, 9]), axis=0) ** 2), argnums=0
    )(x),
}
if keras.backend.backend() != "jax":
    del STEPS["gradient of a place past the end"]  # an error there


@pytest.mark.parametrize("name", STEPS)
def test_the_numbers_are_those_of_the_exact_shape(name: str) -> None:
    policy = "bucket" if keras.backend.backend() == "jax" else "dynamic"
    exact = ts.function(STEPS[name], shapes="exact")
    varying = ts.function(STEPS[name], shapes=ts.Shapes(policy, background=False))
    with warnings.catch_warnings(), filling("nan"):
        warnings.simplefilter("ignore", ts.SizesWarning)
        for n in SIZES:
            x = np.arange(2 * n, dtype="float32").reshape(n, 2) + 1
            np.testing.assert_array_equal(
                ops.convert_to_numpy(varying(x)), ops.convert_to_numpy(exact(x)), err_msg=str(n)
            )


def test_a_size_that_is_returned_is_a_number() -> None:
    step = ts.function(lambda x: {"n": ops.shape(x)[0], "sum": ops.sum(x)})
    for n in (4, 5, 6):
        assert int(step(np.ones((n, 2), "float32"))["n"]) == n


def test_a_shape_may_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def step(x: Any) -> Any:
        print("tracing", x.shape)
        return ops.sum(x)

    shown = ts.function(step)
    for n in (4, 5, 6):
        assert float(shown(np.ones((n, 2), "float32"))) == 2 * n
    assert shown.trace_count == 2
    assert capsys.readouterr().out.count("tracing") == 2


def test_a_verification_pads_every_size_by_itself() -> None:
    step = ts.function(lambda x: ops.sum(x), dynamic={"x": 1})
    assert step.verify(np.ones((3, 2000), "float32")).exact


@pytest.mark.slow
def test_random_draws_of_every_kind_are_those_of_the_exact_shape() -> None:
    draws: dict[str, Callable[[Any], Any]] = {
        "normal": lambda x: keras.random.normal(ops.shape(x), seed=3),
        "uniform": lambda x: keras.random.uniform(ops.shape(x), seed=3),
        "gamma": lambda x: keras.random.gamma(ops.shape(x), 2.0, seed=3),
        "integers": lambda x: keras.random.randint(ops.shape(x), 0, 9, seed=3),
        "categorical": lambda x: keras.random.categorical(x, 4, seed=3),
    }
    policy = "bucket" if keras.backend.backend() == "jax" else "dynamic"
    for name, draw in draws.items():
        exact = ts.function(draw, shapes="exact")
        shapes = ts.Shapes(policy, grid=(9,) if policy == "bucket" else None, background=False)
        varying = ts.function(draw, shapes=shapes, dynamic={"x": 1})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ts.SizesWarning)
            for n, t in ((4, 3), (5, 7)):
                x = np.ones((n, t), "float32")
                found, wanted = varying(x), exact(x)
                np.testing.assert_array_equal(
                    ops.convert_to_numpy(found), ops.convert_to_numpy(wanted), err_msg=name
                )
