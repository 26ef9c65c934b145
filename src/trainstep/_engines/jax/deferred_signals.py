"""JAX: signals that come while a program is called through Python.

    signal --while the old state is given away and the new one not stored--> kept --> its handler

A hit is a call in C, and Python handles signals between its own instructions. But JAX makes the
first call of each kind in Python (of a program, with NumPy arrays, with arrays of its own): there
Ctrl-C could fall when the old state was donated and the new one is not in place yet.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
from jax._src.interpreters import pxla

Late = list[Callable[[], None]]  # what is to be done once the new state is in place

_late: weakref.WeakKeyDictionary[Any, Late] = weakref.WeakKeyDictionary()


def keeping_signals(compiled: Any) -> Late:
    """Keeps signals that come while a compiled program is called through Python.

    Returns:
        A list, empty but after such a call; then it has a function that calls the handlers.
    """
    late: Late = []
    call = getattr(getattr(compiled, "_executable", None), "unsafe_call", None)
    if type(call) is pxla.ExecuteReplicated:
        _late[call] = late
        call.__class__ = _Keeping
    return late


class _Keeping(pxla.ExecuteReplicated):  # type: ignore[misc]
    """What calls a program, in Python."""

    __slots__ = ()

    def __call__(self, *args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():  # which hears all signals
            return super().__call__(*args)
        handle = _kept()
        try:
            results = super().__call__(*args)
        except BaseException:
            handle()  # nothing was given away
            raise
        _late[self].append(handle)
        return results


def _kept() -> Callable[[], None]:
    """Keeps signals from their handlers; gives a function that lets them through."""
    came: list[tuple[int, Any]] = []
    handlers: dict[int, Any] = {}
    is_over = False

    def keep(number: int, frame: Any) -> None:
        if is_over:  # an exception has kept a handler from being put back
            handlers[number](number, frame)
        else:
            came.append((number, frame))

    def handle() -> None:
        nonlocal is_over
        is_over = True
        with contextlib.ExitStack() as each:  # all of them, even if one raises
            for number, frame in reversed(came):
                each.callback(handlers[number], number, frame)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    try:
        for number in signal.valid_signals() - _others():
            handler = signal.getsignal(number)
            if callable(handler):  # Python's; others do not run Python
                handlers[number] = handler
                signal.signal(number, keep)
    except BaseException:  # of a handler that was not replaced yet
        handle()
        raise
    return handle


def _others() -> set[int]:
    """Signals that somebody hears without Python knowing, as JAX does in one of many processes."""
    return {signal.SIGTERM} if jax.distributed.is_initialized() else set()
