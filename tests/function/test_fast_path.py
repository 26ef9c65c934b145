"""The short way for a call like the last one never mistakes one call for another."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import pytest

import trainstep as ts
from trainstep._function import program_cache
from trainstep.testing import NullEngine, assert_traces

pytestmark = pytest.mark.plain


class Echo(NullEngine):
    """Answers with the arrays that a program was given."""

    def trace(self, step: Any, leaves: Any, recorder: Any, options: Any, axes: Any = None) -> Any:
        traced = super().trace(step, leaves, recorder, options, axes)
        traced.build = lambda compiler: lambda leaves: [np.asarray(x) for x in leaves]
        return traced


def zeros(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(shape, dtype)


def test_a_default_left_out_still_reaches_the_program() -> None:
    step = ts.function(engine=Echo())(lambda x, scale=2.0: (x, scale))
    for _ in range(4):
        x, scale = step(zeros(3))
        assert (x.shape, float(scale)) == ((3,), 2.0)
    for _ in range(4):
        assert float(step(zeros(3), 5.0)[1]) == 5.0
    assert float(step(zeros(3))[1]) == 2.0


def test_another_shape_dtype_kind_or_count_goes_the_long_way() -> None:
    step = ts.function(engine=Echo())(lambda x, y=None: (x, y))
    calls: list[tuple[Any, ...]] = [
        (zeros(3), zeros(3)),
        (zeros(3), zeros(4)),
        (zeros(3), zeros(3, dtype="int32")),
        (zeros(3), None),
        (zeros(3),),
        (zeros(3), 1.0),
        (zeros(3, dtype="float64"), zeros(3)),
    ]
    # Of the seven, those of another dtype and those without `y` share the program of another one.
    with assert_traces(step, 4):
        for args in calls * 3:
            for _ in range(3):
                x, y = step(*args)
                assert x.shape == args[0].shape
                assert x.dtype == "float32"
                if len(args) == 2 and isinstance(args[1], np.ndarray):
                    assert (y.shape, y.dtype) == (args[1].shape, "float32")


def test_keywords_and_positions_are_one_call() -> None:
    step = ts.function(engine=Echo())(lambda x, y: (x, y))
    with assert_traces(step, 1):
        for _ in range(3):
            first = step(zeros(2), zeros(3))
            second = step(y=zeros(3), x=zeros(2))
            assert [a.shape for a in first] == [a.shape for a in second] == [(2,), (3,)]


def test_the_order_of_keywords_and_keys_costs_nothing() -> None:
    step = ts.function(engine=Echo())(lambda batch, **rest: (batch, rest))
    with assert_traces(step, 1):
        batch, rest = step({"a": zeros(1), "b": zeros(2)}, p=zeros(3), q=zeros(4))
        again, more = step({"b": zeros(2), "a": zeros(1)}, q=zeros(4), p=zeros(3))
    assert batch["b"].shape == again["b"].shape == (2,)
    assert rest["p"].shape == more["p"].shape == (3,)


def test_an_object_that_dies_with_the_process_takes_its_programs_along_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Scale:
        factor = 2.0

    step = ts.function(engine=Echo())(lambda scale, x: x)
    scale = Scale()
    step(scale, zeros(3))
    assert len(step._programs) == 1

    unraised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraised.append)
    for name in vars(program_cache).keys() - {
        "__builtins__"
    }:  # as Python does with modules at its end
        monkeypatch.setitem(vars(program_cache), name, None)
    del scale
    gc.collect()
    monkeypatch.undo()

    assert not unraised
    assert not len(step._programs)
