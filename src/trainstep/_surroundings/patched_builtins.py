"""Temporarily replaces functions that draw random numbers, print, or read the clock.

A replacement (stand-in) calls the original and reports the call to the active listeners. It is
created once, and installed only during tracing.
"""

from __future__ import annotations

import builtins
import datetime
import functools
import os
import random
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from types import FrameType, ModuleType
from typing import Any, Protocol

import numpy as np

_RANDOM = [  # the functions of the hidden generator
    name
    for name, value in vars(random).items()
    if callable(value) and getattr(value, "__self__", None) is random._inst
]
_TIMES = (
    "time time_ns perf_counter perf_counter_ns monotonic monotonic_ns process_time "
    "process_time_ns sleep strftime localtime gmtime ctime"
)
_NUMPY = (
    "beta binomial bytes chisquare choice default_rng dirichlet exponential f gamma geometric "
    "gumbel hypergeometric laplace logistic lognormal logseries multinomial multivariate_normal "
    "negative_binomial noncentral_chisquare noncentral_f normal pareto permutation poisson power "
    "rand randint randn random random_integers random_sample ranf rayleigh sample seed shuffle "
    "standard_cauchy standard_exponential standard_gamma standard_normal standard_t triangular "
    "uniform vonmises wald weibull zipf"
)
_WATCHED: list[tuple[Any, str, str]] = [
    (random, "random", " ".join(_RANDOM)),
    (np.random, "random", _NUMPY),
    (os, "random", "urandom"),
    (uuid, "random", "uuid1 uuid4"),
    (secrets, "random", "token_bytes token_hex token_urlsafe randbelow choice randbits"),
    (time, "clock", _TIMES),
    (builtins, "print", "print"),
    (builtins, "file", "input open"),
]


class Listener(Protocol):
    """Receives the calls of replaced functions."""

    def calling(self, kind: str, called: str, frame: FrameType) -> bool:
        """Called before a call from `frame`; returns whether to report the result, too."""
        ...

    def called(self, kind: str, called: str, frame: FrameType, result: Any) -> None:
        """Called after it, with the result."""
        ...


active_listeners: list[Listener] = []  # the last one is asked first
_made: dict[tuple[int, str], tuple[Any, Any]] = {}
_lock = threading.Lock()


class Installed:
    """An installed stand-in, and the number of traces that use it."""

    def __init__(self, place: dict[str, Any], name: str, original: Any, stand_in: Any) -> None:
        self.place, self.name, self.original, self.stand_in = place, name, original, stand_in
        self.users = 0


_installed: dict[tuple[int, str], Installed] = {}


def install(modules: Iterable[dict[str, Any]], installed: list[Installed]) -> None:
    """Installs the stand-ins, also where `modules` imported a name (`from random import gauss`).

    Several threads may trace at once: a stand-in stays installed until the last trace has ended.
    Classes are not replaced, since other code may use them in `isinstance`.

    Args:
        modules: Dicts of globals.
        installed: The installed stand-ins are appended, for `uninstall`.
    """
    with _lock:
        known: dict[int, tuple[Any, Any]] = {}
        for place, kind, name, original in _originals():
            stand_in = _stand_in(place, kind, name, original)
            known[id(original)] = (original, stand_in)
            _install(place, name, original, stand_in, installed)
        # Other threads use the module `datetime`, too: it is replaced in the user's globals only.
        known |= {id(original): (original, stand_in) for original, stand_in in _clocks()}
        for module in modules:
            for name, value in list(module.items()):
                held = _installed.get((id(module), name))
                original, stand_in = known.get(id(value), (None, None))
                if held is not None and held.stand_in is value:
                    _install(module, name, held.original, value, installed)
                elif stand_in is not None and original is value:
                    _install(module, name, original, stand_in, installed)


def uninstall(installed: list[Installed]) -> None:
    """Restores the originals that no other trace has replaced."""
    with _lock:
        while installed:
            entry = installed.pop()
            entry.users -= 1
            if not entry.users:
                del _installed[id(entry.place), entry.name]
                if entry.place.get(entry.name) is entry.stand_in:
                    entry.place[entry.name] = entry.original


def _install(
    place: dict[str, Any], name: str, original: Any, stand_in: Any, installed: list[Installed]
) -> None:
    key = (id(place), name)
    if key not in _installed:
        _installed[key] = Installed(place, name, original, stand_in)
    _installed[key].users += 1
    installed.append(_installed[key])
    place[name] = stand_in


def _originals() -> Iterator[tuple[dict[str, Any], str, str, Any]]:
    for module, kind, names in _WATCHED:
        for name in names.split():
            held = _installed.get((id(vars(module)), name))
            original = vars(module).get(name)
            if held is not None and original is held.stand_in:
                original = held.original
            if original is not None:
                yield vars(module), kind, name, original


def _stand_in(place: dict[str, Any], kind: str, name: str, original: Any) -> Any:
    made = _made.get((id(place), name))
    if made is None or made[0] is not original:  # other code has replaced the function since
        called = name if place is vars(builtins) else f"{place['__name__']}.{name}"
        made = _made[id(place), name] = (original, _reporting(original, kind, called))
    return made[1]


def _reporting(original: Any, kind: str, called: str) -> Any:
    """A function that calls `original` and reports the call."""

    @functools.wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        listeners = reversed(active_listeners.copy())
        wanted = next((each for each in listeners if each.calling(kind, called, frame)), None)
        result = original(*args, **kwargs)
        if wanted is not None:
            wanted.called(kind, called, frame, result)
        return result

    found: Any = stand_in
    found.stands_for = called
    if called != "print":  # AutoGraph converts `print` itself; it must not convert the others
        found.autograph_info__ = {}
    return found


@functools.cache
def _clocks() -> list[tuple[Any, Any]]:
    """The module `datetime` and its classes, each with its stand-in."""
    module = ModuleType("datetime")
    vars(module).update(vars(datetime))
    pairs: list[tuple[Any, Any]] = [(datetime, module)]
    for name in ("datetime", "date"):
        original = getattr(datetime, name)
        pairs.append((original, _clock(original, "clock", f"datetime.{name}")))
        setattr(module, name, pairs[-1][1])
    return pairs


def _clock(original: Any, kind: str, called: str) -> Any:
    """A subclass of a `datetime` class that reports calls of `now` and the like."""

    class Kind(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, original)

        def __subclasscheck__(cls, kind: Any) -> bool:
            return issubclass(kind, original)

    class Clock(original, metaclass=Kind):  # type: ignore[misc]
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

    for name in ("now", "utcnow", "today"):
        if hasattr(original, name):
            reporting = _reporting(getattr(original, name), kind, f"{called}.{name}")
            setattr(Clock, name, staticmethod(reporting))
    Clock.__name__ = Clock.__qualname__ = original.__name__
    return Clock
