"""Which sizes are compiled, when, and what serves a call."""

from __future__ import annotations

import numpy as np
import pytest

import trainstep as ts
from trainstep._function.sizes.buckets import Buckets
from trainstep._function.sizes.policy import Shapes
from trainstep.testing import NullEngine

pytestmark = pytest.mark.plain


def buckets(first: int, name: str = "batch", **settings: object) -> Buckets:
    return Buckets([name], {name: first}, Shapes(**settings))  # type: ignore[arg-type]


def function(policy: str = "auto", **settings: object) -> tuple[NullEngine, ts.Function]:  # type: ignore[type-arg]
    engine = NullEngine("bucket")
    shapes = Shapes(policy, background=False, **settings)  # type: ignore[arg-type]
    return engine, ts.function(lambda x: x, engine=engine, shapes=shapes)


def test_the_first_size_stands_on_the_grid() -> None:
    found = buckets(100)
    assert [found.cell([n])[0] for n in (1, 8, 9, 30, 51, 100, 101, 300)] == [
        8, 8, 16, 32, 56, 100, 200, 400,
    ]  # fmt: skip


def test_a_time_axis_has_a_finer_grid_than_a_batch() -> None:
    assert [c for (c,) in buckets(96, "time").up_to({"time": 96})] == [96, 64, 48, 32, 24, 16, 8]
    assert [c for (c,) in buckets(96).up_to({"batch": 96})] == [96, 48, 24, 16, 8]


@pytest.mark.parametrize("first", range(1, 150))
def test_every_first_length_leaves_few_buckets_for_149_lengths(first: int) -> None:
    found = buckets(first, "time")
    assert len({found.cell([n]) for n in range(1, 150)}) <= 9


def test_a_grid_of_ones_own_goes_on_beyond_its_end() -> None:
    found = buckets(5, grid=(4, 10), multiple=1)
    assert [found.cell([n])[0] for n in (1, 4, 5, 10, 11, 25)] == [4, 4, 10, 10, 20, 40]


def test_two_sizes_have_buckets_of_both() -> None:
    found = Buckets(["batch", "time"], {"batch": 16, "time": 8}, Shapes())
    assert found.cell([3, 9]) == (8, 16)
    found.compiled += [(16, 8), (16, 16), (8, 16)]
    assert found.serving([3, 9]) == (8, 16)
    assert found.serving([9, 9]) == (16, 16)
    assert found.serving([17, 1]) is None


def test_a_closer_bucket_is_worth_it_once_it_would_have_saved_its_price() -> None:
    found = buckets(32, patience=10)
    found.compiled.append((32,))
    account = found.account([8], (32,))
    assert account.saved == 24
    # Ten steps of eight rows are 80: four calls would have saved 96.
    assert [found.note(account) for _ in range(4)] == [False, False, False, True]
    assert (found.rows, found.padded) == (32, 128)


def test_a_size_that_is_served_closely_saves_nothing() -> None:
    found = buckets(32, patience=1)
    found.compiled.append((32,))
    account = found.account([30], (32,))
    assert account.saved == 0
    assert not any(found.note(account) for _ in range(1000))


def test_auto_compiles_the_first_size_as_it_is_and_records_once_for_the_others() -> None:
    engine, f = function()
    for n in (32, 32, 5, 7, 32, 5):
        f(np.zeros((n, 2)))
    assert f.trace_count == 2
    assert engine.buckets == [{"batch": 32}]
    assert [e.kind for e in f.ledger] == ["trace", "trace", "bucket"]
    assert f.ledger[1].changes == ("x: float32[32,2] -> float32[5,2]",)
    assert f.ledger[1].signature == "x: float32[batch,2]"


def test_bucket_records_at_once() -> None:
    engine, f = function("bucket")
    for n in (32, 5, 100):
        f(np.zeros((n, 2)))
    assert f.trace_count == 1
    assert engine.buckets == [{"batch": 32}, {"batch": 128}]


def test_exact_traces_every_size() -> None:
    engine, f = function("exact")
    for n in (32, 5, 100):
        f(np.zeros((n, 2)))
    assert (f.trace_count, engine.buckets) == (3, [])


def test_the_bound_holds_and_says_what_went() -> None:
    _, f = function("exact", max_programs=2)
    for n in (1, 2, 1, 3):  # 2 was used longest ago
        f(np.zeros(n))
    assert f.program_count == 2
    assert [e.kind for e in f.ledger] == ["trace", "trace", "trace", "evicted"]
    assert f.ledger[3].nearest == 2
    f(np.zeros(1))
    assert f.trace_count == 3
    f(np.zeros(2))
    assert f.trace_count == 4


def test_buckets_of_one_record_are_bounded() -> None:
    engine, f = function("bucket", buckets=2)
    for n in (8, 16, 32, 64, 128):
        f(np.zeros(n))
    assert len(engine.buckets) == 5
    assert f.program_count == 2


def test_an_axis_is_declared_by_a_spec_or_by_name() -> None:
    for options in (
        {"signature": [ts.Spec((None, None))]},
        {"signature": [ts.Spec(("batch", "time"))]},
        {"dynamic": {"x": 1}},
        {"dynamic": {"x": (0, 1)}},
        {"dynamic": {"x": -1}},
    ):
        engine = NullEngine("bucket")
        f = ts.function(lambda x: x, engine=engine, **options)  # type: ignore[call-overload]
        for n, t in ((4, 9), (4, 7), (3, 5), (2, 9)):
            f(np.zeros((n, t), "float32"))
        assert f.trace_count == 2, options
        assert [set(b) for b in engine.buckets] == [{"batch", "time"}], options


def test_sizes_that_were_equal_by_chance_are_told_apart_once_they_differ() -> None:
    engine = NullEngine("bucket")
    f = ts.function(lambda x: x, engine=engine, dynamic={"x": 1})
    for n, t in ((8, 8), (6, 6), (6, 5), (3, 7)):
        f(np.zeros((n, t)))
    assert f.trace_count == 3  # exact, square, both
    assert [set(b) for b in engine.buckets] == [{"batch"}, {"batch", "time"}]


def test_an_axis_that_nobody_named_is_a_program_each() -> None:
    engine = NullEngine("bucket")
    f = ts.function(lambda x: x, engine=engine)
    for t in (4, 5, 6):
        f(np.zeros((8, t)))
    assert (f.trace_count, engine.buckets) == (3, [])


def test_warming_up_leaves_nothing_to_compile() -> None:
    engine = NullEngine("bucket")
    f = ts.function(lambda x: x, engine=engine)
    f.warm_up(ts.Spec((None, 2)), largest=100)
    before = len(f.ledger)
    for n in range(1, 101):
        f(np.zeros((n, 2), "float32"))
    assert len(f.ledger) == before
    assert f.trace_count == 1


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"policy": "magic"}, "'auto' or 'exact'"),
        ({"ratio": 1.0}, "more than 1"),
        ({"grid": ()}, "sizes of 1 or more"),
        ({"grid": {"batch": (0,)}}, "sizes of 1 or more"),
        ({"max_programs": 0}, "max_programs"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(settings: dict[str, object], part: str) -> None:
    with pytest.raises(ts.ArgumentError, match=part):
        Shapes(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("dynamic", [{"z": 0}, {"x": "time"}, {"x": {"a": None}}])
def test_axes_that_cannot_be_are_refused(dynamic: dict[str, object]) -> None:
    with pytest.raises(ts.ArgumentError, match="dynamic"):
        ts.function(lambda x: x, engine=NullEngine(), dynamic=dynamic)
