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
from trainstep._engines.jax import program
from trainstep._engines.jax.tricks import direct_call

X = np.arange(6, dtype="float32").reshape(2, 3)


class Calls:
    """Counts the calls that go through the entry, and those that go straight."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.straight = 0, 0
        self.refuses = False
        entry, straight = direct_call.entry, direct_call.straight

        def counted_entry(compiled: Any) -> Callable[..., Any]:
            call = entry(compiled)

            def enter(*operands: Any) -> Any:
                self.entered += 1
                return call(*operands)

            return enter

        def counted_straight(compiled: Any, state: Any, inputs: Any) -> Any:
            way = straight(compiled, state, inputs)
            assert way is not None, "a private name of JAX's is gone"
            execute = way.names["execute"]

            def run(operands: Any) -> Any:
                self.straight += 1
                return execute(operands)

            way.names["execute"] = refusing() if self.refuses else run
            return way

        monkeypatch.setattr(direct_call, "_MANY", 0)
        monkeypatch.setattr(program, "entry", counted_entry)
        monkeypatch.setattr(program, "straight", counted_straight)


def refusing() -> Any:
    """An executable that none of the operands here fit."""
    few = jax.jit(lambda: jax.numpy.zeros(3)).lower().compile()
    return few._executable.unsafe_call.xla_executable.execute_sharded


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
    calls.refuses = True
    total, add = counter()
    for _ in range(4):
        assert float(add(X)) == X.sum()
    assert calls.entered == 4
    np.testing.assert_array_equal(total.numpy(), 4 * X.sum(0))


@pytest.mark.parametrize("writes", [True, False])
def test_what_is_refused_goes_through_the_entry_whatever_a_step_writes(
    calls: Calls, writes: bool
) -> None:
    calls.refuses = True
    total = keras.Variable(np.ones(3, "float32"))

    @ts.function
    def step(x):
        if writes:
            total.assign_add(ops.sum(x, axis=0))
        return ops.sum(x) + total.value[0]

    results = [float(step(X)) for _ in range(5)]
    assert results == [19 + 3 * i if writes else 16 for i in range(5)]


def layouts() -> dict[str, Any]:
    """Places of an array that a program was not compiled for."""
    from jax.experimental.layout import Format, Layout

    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {
        "turned": Format(Layout((1, 0)), here),
        "elsewhere in memory": here.with_memory_kind("pinned_host"),
    }


@pytest.mark.parametrize("kind", layouts())
@pytest.mark.parametrize("written", [True, False])
def test_a_value_that_lies_otherwise_is_never_taken_for_what_it_is_not(
    calls: Calls, kind: str, written: bool
) -> None:
    kernel = keras.Variable(X)

    @ts.function
    def step(x):
        if written:
            kernel.assign(kernel * 2)
        return kernel + x

    for _ in range(3):
        step(X)
    kernel.assign(jax.device_put(X + 1, layouts()[kind]))
    straight = calls.straight
    with pytest.raises(ValueError, match=r"layout|shardings"):  # JAX's own words
        step(X)
    assert calls.straight == straight
    np.testing.assert_array_equal(kernel.numpy(), X + 1)
    kernel.assign(X)
    np.testing.assert_array_equal(step(X), (3 if written else 2) * X)


def test_values_that_others_have_assigned_go_straight_once_they_were_looked_at(
    calls: Calls,
) -> None:
    total, add = counter()
    for number in range(4):
        add(X)
        total.assign(np.full(3, number))
    add(X)
    assert calls.entered == 2
    np.testing.assert_array_equal(total.numpy(), 3 + X.sum(0))


def test_a_step_that_returns_keys_gives_no_memory_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX makes keys in Python, where a signal may come before the new state is stored."""
    donated: list[Any] = []
    real = jax.jit

    def noted(*args: Any, **how: Any) -> Any:
        donated.append(how.get("donate_argnums"))
        return real(*args, **how)

    monkeypatch.setattr(program.jax, "jit", noted)
    total = keras.Variable(np.zeros(3, "float32"))

    @ts.function
    def step(x):
        total.assign_add(x[0])
        return jax.random.key(0)

    step(X)
    assert jax.numpy.issubdtype(step(X).dtype, jax.dtypes.prng_key)
    assert () in donated
    assert (0,) not in donated
    np.testing.assert_array_equal(total.numpy(), 2 * X[0])


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
