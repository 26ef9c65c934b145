"""How JAX's programs are called: past the entry that looks at every operand, and back to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("how JAX's programs are called", allow_module_level=True)

import jax
from keras import ops

import trainstep as ts
from trainstep._engines import _jax_calls, _jax_program

X = np.arange(6, dtype="float32").reshape(2, 3)


class Calls:
    """Counts the calls that go through the entry, and those that go straight."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.straight = 0, 0
        self.refuses = False
        entry, straight = _jax_calls.entry, _jax_calls.straight

        def counted_entry(compiled: Any) -> Callable[..., Any]:
            call = entry(compiled)

            def enter(*operands: Any) -> Any:
                self.entered += 1
                return call(*operands)

            return enter

        def counted_straight(compiled: Any, inputs: Any) -> Any:
            way = straight(compiled, inputs)
            assert way is not None, "a private name of JAX's is gone"
            execute = way.names["execute"]

            def run(operands: Any) -> Any:
                self.straight += 1
                if self.refuses:
                    raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: refused")
                return execute(operands)

            way.names["execute"] = run
            return way

        monkeypatch.setattr(_jax_program, "entry", counted_entry)
        monkeypatch.setattr(_jax_program, "straight", counted_straight)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def counter() -> tuple[keras.Variable, Any]:
    total = keras.Variable(np.zeros(3, "float32"))

    @ts.function
    def add(x):
        total.assign_add(ops.sum(x, axis=0))
        return ops.sum(x)

    return total, add


def test_from_the_second_hit_on_calls_with_numpy_go_straight(calls: Calls) -> None:
    total, add = counter()
    for _ in range(5):
        assert float(add(X)) == X.sum()
    assert (calls.entered, calls.straight) == (2, 3)
    np.testing.assert_array_equal(total.numpy(), 5 * X.sum(0))


def test_arrays_of_the_users_go_through_the_entry(calls: Calls) -> None:
    """They may lie on another device, or in another order of their axes."""
    total, add = counter()
    for _ in range(4):
        add(ops.convert_to_tensor(X))
    assert calls.straight == 0
    np.testing.assert_array_equal(total.numpy(), 4 * X.sum(0))


def test_what_is_refused_goes_through_the_entry(calls: Calls) -> None:
    total, add = counter()
    for _ in range(3):
        add(X)
    calls.refuses = True
    entered = calls.entered
    assert float(add(X)) == X.sum()
    assert calls.entered == entered + 1
    np.testing.assert_array_equal(total.numpy(), 4 * X.sum(0))


def test_a_variable_without_a_value_is_an_error_and_changes_nothing() -> None:
    total, other = (keras.Variable(np.zeros(3, "float32")) for _ in range(2))

    @ts.function
    def add(x):
        total.assign_add(ops.sum(x, axis=0))
        other.assign_add(total.value)

    for _ in range(3):
        add(X)
    kept = other.numpy().copy()
    total.value.delete()
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        add(X)
    np.testing.assert_array_equal(other.numpy(), kept)
    total.assign(np.zeros(3))
    add(X)
    np.testing.assert_array_equal(other.numpy(), kept + X.sum(0))


def test_results_are_like_those_of_the_entry(calls: Calls) -> None:
    """Whoever uses them next compiles nothing anew."""
    total, add = counter()
    results = [add(X) for _ in range(4)]
    kinds = {(r.aval, r.sharding, r.committed) for r in results}
    assert len(kinds) == 1
    assert calls.straight == 2
    assert not total.value.committed


def test_what_a_program_does_not_need_is_no_obstacle() -> None:
    unused, total = keras.Variable(np.ones(3, "float32")), keras.Variable(0.0)

    @ts.function
    def add(x, y):
        unused.value * 2
        total.assign_add(ops.sum(x))
        return total.value

    assert [float(add(X, X)) for _ in range(4)] == [15.0, 30.0, 45.0, 60.0]
    np.testing.assert_array_equal(unused.numpy(), [1, 1, 1])
