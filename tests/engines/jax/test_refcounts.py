"""Other owners of an array are found by reference counts only where that is shown to work."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest

import trainstep as ts
from tests.helpers import normal, values_of
from trainstep._engines.jax import program, refcounts
from trainstep._engines.jax.inputs import PlainInputs
from trainstep._engines.jax.tricks import input_buffers, row_buffers

COUNTED: tuple[Callable[[], Any], ...] = (
    program._unshared_count,
    input_buffers._own_references,
    row_buffers._unshared_count,
)


@pytest.fixture
def measured_again() -> Iterator[None]:
    def forget() -> None:
        for each in COUNTED:
            each.cache_clear()  # type: ignore[attr-defined]

    forget()
    yield
    forget()


def test_on_this_python_counts_show_other_owners(measured_again: None) -> None:
    assert None not in [each() for each in COUNTED]


@pytest.mark.parametrize("install", [sys.setprofile, sys.settrace])
def test_a_debugger_that_looks_does_not_count(install: Any, measured_again: None) -> None:
    """Up to Python 3.12, `f_locals` holds what it shows; the count must be right after that."""
    before = [each() for each in COUNTED]
    for each in COUNTED:
        each.cache_clear()  # type: ignore[attr-defined]

    def look(frame: Any, event: str, value: Any) -> Any:
        assert frame.f_locals is not None
        return look

    kept = sys.getprofile(), sys.gettrace()
    install(look)
    try:
        counts = [each() for each in COUNTED]
    finally:
        sys.setprofile(kept[0])
        sys.settrace(kept[1])
    assert counts == before


def test_a_step_copies_nothing_that_has_no_other_owner() -> None:
    """The counts in the code of a step are those that were measured."""
    weights = [keras.Variable(normal(3, seed=seed)) for seed in range(3)]

    @ts.function
    def step(x):
        for w in weights:
            w.assign(w + x)
        return weights[0] * 2.0

    def run(times: int) -> None:
        for _ in range(times):
            float(step(normal(3, seed=7))[0])

    run(5)
    (compiled,) = step._programs.all()
    (buffer,) = compiled.executable._inputs._buffers
    copied: list[Any] = []
    compiled.executable._copy = lambda x: copied.append(x) or program._copy(x)
    run(50)
    assert not copied
    assert len(buffer._blocks) < 5  # used again

    held = weights[1].value
    run(1)
    assert len(copied) == 1
    assert copied[0] is held


def useless(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """Has the counts of this Python be of no use."""
    if reason == "threads run without the GIL":
        monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
        return
    # Every object has one owner, as if the interpreter borrowed or deferred all references.
    for module in (program, input_buffers, row_buffers):
        monkeypatch.setattr(module, "refcount", lambda value: 1)
    monkeypatch.setitem(program._TOOLS, "refcount", lambda value: 1)


REASONS = ["threads run without the GIL", "reference counts do not show"]


@pytest.mark.parametrize("reason", REASONS)
def test_counts_that_show_no_owners_are_not_used_and_the_log_says_so_once(
    reason: str,
    measured_again: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    useless(monkeypatch, reason)

    with caplog.at_level(logging.WARNING, "trainstep"):
        assert [each() for each in COUNTED * 2] == [None] * 6

    assert len(caplog.messages) == 3
    for message, what in zip(caplog.messages, ("variable", "argument", "rows"), strict=True):
        assert what in message
        assert "is copied, which is slower" in message
        assert reason in message


@pytest.mark.parametrize("reason", REASONS)
def test_without_counts_steps_copy_and_nothing_that_is_held_changes(
    reason: str, measured_again: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = normal(8, 3, seed=1), normal(8, 1, seed=2)

    def trained() -> tuple[Any, list[np.ndarray], list[np.ndarray]]:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        trainer = ts.Trainer(model, optimizer="adam", loss="mse")
        for _ in range(4):
            trainer.train_on_batch(x, y)
        held, copies = [v.value for v in model.variables], values_of(model.variables)
        for _ in range(4):
            trainer.train_on_batch(x, y)
        trainer.fit(x, y, batch_size=4, epochs=2, progress=False)
        for array, copy in zip(held, copies, strict=True):
            np.testing.assert_array_equal(array, copy)
        return trainer, copies, values_of(model.variables)

    _, *wanted = trained()
    for each in COUNTED:
        each.cache_clear()  # type: ignore[attr-defined]
    useless(monkeypatch, reason)
    trainer, *got = trained()

    np.testing.assert_equal(got, wanted)  # the same program, so the same bits
    (compiled, *_) = trainer._functions.step("train")._programs.all()
    assert not compiled.executable._donates
    assert isinstance(compiled.executable._inputs, PlainInputs)


def test_a_count_is_measured_in_the_code_that_compares_it() -> None:
    def count(references: int) -> int | None:
        def trial(expected: Any, is_shared: bool) -> bool:
            value = object()
            own = [value] * references
            other = value if is_shared else None
            found = refcounts.refcount(value) > expected
            del own, other
            return found

        return refcounts.expected_count("a value", trial, most=9)

    alone = count(0)
    assert alone is not None
    assert count(5) == alone + 5
