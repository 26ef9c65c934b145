"""The zoo and its judge themselves: names, groups, data of the sizes asked for, and a judge that
sees every kind of difference. That each case runs is what `python -m tests.function.sizes.table sound` checks.
"""

from __future__ import annotations

from dataclasses import replace

import keras
import numpy as np
import pytest

from .judge import TOLERANCE, Bench, Results, difference, sound
from .zoo import CASES, ENGINES

pytestmark = pytest.mark.slow

GROUPS = {"task": 90, "sequence": 60, "layer": 60}  # at least so many


def test_the_zoo_is_as_large_as_it_says() -> None:
    for group, count in GROUPS.items():
        assert sum(case.group == group for case in CASES.values()) >= count, group


def test_cases_speak_of_engines_that_exist_and_give_reasons() -> None:
    for case in CASES.values():
        assert case.group in GROUPS, case.name
        assert set(case.expected) | set(case.reasons) | set(case.unfit) <= set(ENGINES), case.name
        assert set(case.expected.values()) <= {"exact", "refused"}, case.name
        assert all(case.unfit.values()), case.name
        assert case.engines, case.name


# Others differ in a table's row only; building all would take a minute.
SAMPLE = ("dense_regression", "causal_language_model", "layer_conv3d", "metric_r2", "stateful_lstm")


@pytest.mark.parametrize("name", SAMPLE)
def test_arrays_have_the_sizes_asked_for(name: str) -> None:
    case = CASES[name]
    for n, t in case.sized([(5, 7), (3, 4)]):
        arrays = case.build().data(n, t, np.random.default_rng(0))
        assert {array.shape[0] for array in arrays.values()} == {n}
        assert {arrays[timed].shape[1] for timed in case.timed} <= {t}


@pytest.mark.parametrize("name", ["batch_norm_dense", "lstm_with_dropout", "metric_auc"])
def test_a_run_leaves_the_variables_as_they_were(name: str) -> None:
    bench = Bench(CASES[name])
    before = [np.array(keras.ops.convert_to_numpy(v), copy=True) for v in bench.states]

    results = bench.run(bench.step, (5, 7))

    changed = [
        not np.array_equal(a, b) for a, b in zip(before, results.states.values(), strict=True)
    ]
    assert any(changed)
    for was, variable in zip(before, bench.states, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), was)


@pytest.mark.parametrize("name", ["variational_autoencoder", "multi_head_attention"])
def test_cases_run_at_exact_shapes(name: str) -> None:
    assert len(sound(CASES[name], [(5, 7)])) == 1


def some() -> Results:
    return Results(
        np.array(2.0, "float32"),
        {"w": np.array([1.0, np.nan, -100.0], "float32")},
        {"mean": np.array([0.5], "float32"), "seed": np.array([7, 4_000_000_000], "uint32")},
    )


def test_equal_runs_do_not_differ() -> None:
    assert difference(some(), some())[0] == 0


def test_gradients_are_relative_to_the_largest() -> None:
    other = replace(some(), gradients={"w": np.array([1.0 + 1e-4, np.nan, -100.0], "float32")})
    assert 0 < difference(some(), other)[0] < TOLERANCE


@pytest.mark.parametrize(
    "other",
    [
        replace(some(), loss=np.array(2.001, "float32")),
        replace(some(), loss=np.array(np.nan, "float32")),
        replace(some(), gradients={"w": np.array([1.0, 0.0, -100.0], "float32")}),
        replace(some(), gradients={"w": np.array([np.nan, np.nan, -100.0], "float32")}),
        replace(some(), gradients={"w": np.array([1.0, np.nan], "float32")}),
        replace(some(), states={**some().states, "mean": np.array([0.501], "float32")}),
        replace(some(), states={**some().states, "seed": np.array([7, 4_000_000_001], "uint32")}),
    ],
    ids=["loss", "nan loss", "nan gone", "nan more", "shape", "state", "seed"],
)
def test_the_judge_sees_each_kind_of_difference(other: Results) -> None:
    assert difference(some(), other)[0] > TOLERANCE
