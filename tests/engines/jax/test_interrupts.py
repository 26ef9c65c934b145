"""Ctrl-C while JAX calls a program through Python, which it does the first time."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from jax._src.interpreters import pxla

import trainstep as ts
from trainstep._engines.jax.tricks import donation

X = np.ones((2, 3), "float32")


@pytest.fixture
def presses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Sends these signals whenever JAX has run a program in Python, and before it has told so."""
    signals: list[int] = []
    real = pxla.ExecuteReplicated.__call__

    def pressed(self: Any, *args: Any) -> Any:
        results = real(self, *args)
        for number in signals:
            signal.raise_signal(number)
        return results

    monkeypatch.setattr(pxla.ExecuteReplicated, "__call__", pressed)
    handler = signal.getsignal(signal.SIGUSR1)
    yield signals
    signal.signal(signal.SIGUSR1, handler)


def counter() -> tuple[Any, Any]:
    total = keras.Variable(np.zeros(3, "float32"))

    @ts.function
    def add(x):
        total.assign_add(x[0])
        return x + 1

    return total, add


def test_ctrl_c_in_the_first_call_changes_nothing(presses: list[int]) -> None:
    total, add = counter()
    presses.append(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        add(X)

    presses.clear()
    assert total.numpy().tolist() == [0, 0, 0]
    add(X)
    assert total.numpy().tolist() == [1, 1, 1]


def test_ctrl_c_in_the_second_call_changes_nothing(presses: list[int]) -> None:
    """The first whose state the program has made itself, which JAX may handle in Python, too."""
    total, add = counter()
    add(X)
    presses.append(signal.SIGINT)

    try:
        add(X)
        expected = 2  # JAX called it in C
    except KeyboardInterrupt:
        expected = 1

    presses.clear()
    assert total.numpy().tolist() == [expected] * 3


def test_ctrl_c_in_the_first_call_with_arrays_of_jax_changes_nothing(presses: list[int]) -> None:
    total, add = counter()
    for _ in range(4):
        add(X)
    on_device = keras.ops.convert_to_tensor(X)
    presses.append(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        add(on_device)

    presses.clear()
    assert total.numpy().tolist() == [4, 4, 4]


def test_a_handler_may_run_another_step_on_the_same_variables(presses: list[int]) -> None:
    total, add = counter()
    ten = ts.function(lambda: total.assign_add([10, 10, 10]))
    handled = []
    signal.signal(signal.SIGUSR1, lambda *_: (presses.clear(), handled.append(1), ten()))
    presses.append(signal.SIGUSR1)

    add(X)

    assert handled == [1]
    assert total.numpy().tolist() == [11, 11, 11]


def test_a_handler_that_calls_the_step_in_its_first_call_is_refused(presses: list[int]) -> None:
    """By JAX, which does not call a program inside the first call of it."""
    total, add = counter()
    signal.signal(signal.SIGUSR1, lambda *_: (presses.clear(), add(X)))
    presses.append(signal.SIGUSR1)

    with pytest.raises(RecursionError):
        add(X)

    assert total.numpy().tolist() == [0, 0, 0]
    add(X)
    assert total.numpy().tolist() == [1, 1, 1]


def test_an_error_of_the_program_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, *args: Any) -> Any:
        raise RuntimeError("out of memory")

    total, add = counter()
    with monkeypatch.context() as patch:
        patch.setattr(pxla.ExecuteReplicated, "__call__", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            add(X)

    assert total.numpy().tolist() == [0, 0, 0]
    add(X)
    assert total.numpy().tolist() == [1, 1, 1]


def test_no_signal_handler_is_replaced(presses: list[int]) -> None:
    _, add = counter()
    seen = []
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGUSR1, lambda *_: seen.append(signal.getsignal(signal.SIGINT)))
    presses.append(signal.SIGUSR1)

    add(X)

    assert seen == [before]


def test_a_jax_without_the_entry_in_c_still_gives_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then every call is made in Python, on copies of the state that it donates."""
    monkeypatch.setattr(donation, "atomic_call", lambda compiled: None)
    total, add = counter()
    before = total.value
    for _ in range(5):
        add(X)

    assert total.numpy().tolist() == [5, 5, 5]
    assert np.asarray(before).tolist() == [0, 0, 0]  # another owner keeps its value
