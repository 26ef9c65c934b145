"""Ctrl-C while JAX calls a program through Python, which it does the first time."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("how JAX calls programs", allow_module_level=True)

from jax._src.interpreters import pxla

import trainstep as ts

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


def test_ctrl_c_in_the_first_call_comes_when_the_new_state_is_in_place(presses: list[int]) -> None:
    total, add = counter()
    presses.append(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        add(X)

    presses.clear()
    assert total.numpy().tolist() == [1, 1, 1]
    add(X)
    assert total.numpy().tolist() == [2, 2, 2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_the_first_call_with_arrays_of_jax(presses: list[int]) -> None:
    total, add = counter()
    add(X)
    on_device = keras.ops.convert_to_tensor(X)
    presses.append(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        add(on_device)

    presses.clear()
    assert total.numpy().tolist() == [2, 2, 2]


def test_a_handler_may_call_the_step_that_it_came_in(presses: list[int]) -> None:
    total, add = counter()
    came = []
    signal.signal(signal.SIGUSR1, lambda *_: (presses.clear(), came.append(1), add(X)))
    presses.extend([signal.SIGUSR1, signal.SIGUSR1])

    add(X)

    assert len(came) == 2
    assert total.numpy().tolist() == [3, 3, 3]


def test_every_handler_is_called_even_if_one_raises(presses: list[int]) -> None:
    total, add = counter()
    came = []
    signal.signal(signal.SIGUSR1, lambda *_: came.append(1))
    presses.extend([signal.SIGINT, signal.SIGUSR1])

    with pytest.raises(KeyboardInterrupt):
        add(X)

    assert came == [1]
    assert total.numpy().tolist() == [1, 1, 1]


def test_an_error_of_the_program_puts_the_handlers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, *args: Any) -> Any:
        raise RuntimeError("out of memory")

    total, add = counter()
    with monkeypatch.context() as patch:
        patch.setattr(pxla.ExecuteReplicated, "__call__", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            add(X)

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    add(X)
    assert total.numpy().tolist() == [1, 1, 1]


def test_a_handler_that_raises_while_others_are_replaced_leaves_none_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, came = signal.signal, []

    def interrupt(*_: Any) -> None:
        raise InterruptedError

    def pressed(number: int, handler: Any) -> Any:
        before = real(number, handler)
        if number == signal.SIGINT and signal.getsignal(signal.SIGUSR1) is interrupt:
            signal.raise_signal(signal.SIGUSR1)
        return before

    total, add = counter()
    before = real(signal.SIGUSR1, interrupt)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(signal, "signal", pressed)
            with pytest.raises(InterruptedError):
                add(X)
        assert signal.getsignal(signal.SIGUSR1) is interrupt
        real(signal.SIGUSR1, lambda *_: came.append(1))
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        real(signal.SIGUSR1, before)
        real(signal.SIGINT, signal.default_int_handler)

    assert came == [1]
    add(X)
    assert total.numpy().tolist() == [1, 1, 1]


def test_another_thread_keeps_no_signals(presses: list[int]) -> None:
    total, add = counter()
    seen = []

    def run() -> None:
        add(X)
        seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert seen == [signal.default_int_handler]
    assert total.numpy().tolist() == [1, 1, 1]
