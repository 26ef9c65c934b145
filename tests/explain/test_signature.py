"""Signatures, their differences and the ledger's reasons, without any engine."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest

import trainstep as ts
from trainstep._explain.signature import Part, Signature, nearest
from trainstep.testing import NullEngine, assert_traces

pytestmark = pytest.mark.plain


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, "float32")


def signature(**texts: str) -> Signature:
    return Signature(Part(label, text, "array", text) for label, text in texts.items())


def test_partial_last_batch_costs_one_trace_and_the_ledger_names_it() -> None:
    engine = NullEngine()
    step = ts.function(engine=engine)(lambda x, y: x.sum() + y.sum())

    step(zeros(32, 4), zeros(32))
    step(zeros(32, 4), zeros(32))
    step(zeros(17, 4), zeros(17))

    assert engine.compiled == [[(32, 4), (32,)], [(17, 4), (17,)]]
    assert engine.runs == 3
    assert step.ledger[1].changes == (
        "x: float32[32,4] -> float32[17,4]",
        "y: float32[32] -> float32[17]",
    )


def test_nearest_has_the_fewest_differences_and_the_latest_wins_a_tie() -> None:
    earlier = [signature(x="a", y="a"), signature(x="b", y="b"), signature(x="b", y="c")]

    index, changes = nearest(signature(x="b", y="d"), earlier)

    assert index == 2
    assert [c.text for c in changes] == ["y: c -> d"]


def test_a_new_mix_of_values_seen_before_is_explained() -> None:
    step = ts.function(engine=NullEngine())(lambda x, mode: x)

    step(zeros(2), "train")
    step(zeros(3), "test")
    step(zeros(3), "train")

    assert step.ledger[2].changes == ("argument mode: 'test' -> 'train'",)


def test_a_part_that_appears_is_named_absent_before() -> None:
    (change,) = signature(x="a", y="b").changes(signature(x="a"))
    assert change.text == "y: absent -> b"


def test_numbers_never_retrace_and_are_never_confused_with_flags() -> None:
    step = ts.function(engine=NullEngine())(lambda n: type(n).__name__)

    with assert_traces(step, 3):
        answers = [step(n) for n in (1, 2, 1.0, 2.5, True, 1, 1.0, True)]

    assert answers == ["ndarray"] * 4 + ["bool"] + ["ndarray"] * 2 + ["bool"]


def test_statics_are_told_apart_by_type_and_value() -> None:
    class Color(enum.Enum):
        RED = 1
        BLUE = 2

    step = ts.function(engine=NullEngine())(lambda flag: flag)
    values = [True, False, None, "True", Color.RED, Color.BLUE, b"True", slice(1, 2), slice(1, 3)]

    with assert_traces(step, len(values)):
        assert [step(v) for v in values * 2] == values * 2


class Pair(NamedTuple):
    first: np.ndarray
    second: object


@dataclass(frozen=True)
class Batch:
    x: np.ndarray
    weight: float


def test_structures_go_in_and_come_out_as_they_were() -> None:
    step = ts.function(engine=NullEngine())(lambda tree: tree)
    tree = {"a": [zeros(2), (zeros(3), "s")], "b": Pair(zeros(1), None), "c": Batch(zeros(4), 1.0)}

    out = step(tree)

    assert out["a"][0].shape == (2,)
    assert out["a"][1][1] == "s"
    assert isinstance(out["b"], Pair)
    assert isinstance(out["c"], Batch)
    assert out["c"].x.shape == (4,)


def test_a_key_that_goes_is_explained() -> None:
    step = ts.function(engine=NullEngine())(lambda d: d)
    step({"a": zeros(1), "b": zeros(1)})
    step({"a": zeros(1)})

    assert "d['b']: float32[1] -> absent" in step.ledger[1].changes


def test_float64_and_float32_callers_share_one_program() -> None:
    step = ts.function(engine=NullEngine())(lambda x: x)
    with assert_traces(step, 1):
        step(np.zeros(3, "float64"))
        step(np.zeros(3, "float32"))
        step([0.0, 0.0, 0.0])


def test_an_array_of_strings_is_refused_by_name() -> None:
    step = ts.function(engine=NullEngine())(lambda x, y: x)
    with pytest.raises(ts.ArgumentError, match="`y`"):
        step(zeros(1), np.array(["a"]))


def test_objects_are_held_weakly_and_their_programs_go_with_them() -> None:
    class Thing:
        name = "thing"

    step = ts.function(engine=NullEngine())(lambda thing, x: x)
    first, second = Thing(), Thing()
    step(first, zeros(1))
    step(second, zeros(1))
    assert step.ledger[1].changes == ("argument thing: Thing 'thing' -> another Thing 'thing'",)
    assert len(step._compiler.programs) == 2

    del first

    assert len(step._compiler.programs) == 1


def test_the_limit_raises_before_the_step_runs_and_carries_the_event() -> None:
    engine = NullEngine()
    step = ts.function(engine=engine, max_traces=1)(lambda x: x)
    step(zeros(32, 4))

    with pytest.raises(ts.RetraceLimitError) as caught:
        step(zeros(17, 4))

    assert len(engine.compiled) == 1
    assert caught.value.event.index == 2
    assert caught.value.event.changes == ("x: float32[32,4] -> float32[17,4]",)


def test_assert_traces_shows_the_reasons() -> None:
    step = ts.function(engine=NullEngine())(lambda x: x)

    def traced_twice() -> None:
        with assert_traces(step, 1):
            step(zeros(1))
            step(zeros(2))

    with pytest.raises(AssertionError, match="traced 2 times, not 1"):
        traced_twice()
