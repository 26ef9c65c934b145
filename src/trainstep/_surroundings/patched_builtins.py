"""Functions that draw, print, or read the clock, and their stand-ins, which tell of being called.

A stand-in does what the original does. It is made once, and put in the original's place only while
a step is traced; `heard` is whoever listens then.
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
    """Who is told of calls."""

    def calling(self, kind: str, called: str, frame: FrameType) -> bool:
        """Told before a call from `frame`; whether it wants to hear of the result."""
        ...

    def called(self, kind: str, called: str, frame: FrameType, result: Any) -> None:
        """Told after it."""
        ...


heard: list[Listener] = []  # who listens, the last one first
_made: dict[tuple[int, str], tuple[Any, Any]] = {}
_lock = threading.Lock()


class Placed:
    """A stand-in that is in place, and for how many."""

    def __init__(self, place: dict[str, Any], name: str, original: Any, stand_in: Any) -> None:
        self.place, self.name, self.original, self.stand_in = place, name, original, stand_in
        self.users = 0


_placed: dict[tuple[int, str], Placed] = {}


def replace(modules: Iterable[dict[str, Any]], taken: list[Placed]) -> None:
    """Puts stand-ins in place, also where `modules` took a name (`from random import gauss`).

    Several traces may be under way, in several threads: what one has put there stays until the last
    has ended. Classes are left alone: somebody may ask whether an object is of one.

    Args:
        modules: Dicts of globals.
        taken: Gets what is in place now, to be given back.
    """
    with _lock:
        known: dict[int, tuple[Any, Any]] = {}
        for place, kind, name, original in _originals():
            stand_in = _stand_in(place, kind, name, original)
            known[id(original)] = (original, stand_in)
            _put(place, name, original, stand_in, taken)
        # Other threads look into the module `datetime`, too: it is replaced in user's names only.
        known |= {id(original): (original, stand_in) for original, stand_in in _clocks()}
        for module in modules:
            for name, value in list(module.items()):
                held = _placed.get((id(module), name))
                original, stand_in = known.get(id(value), (None, None))
                if held is not None and held.stand_in is value:
                    _put(module, name, held.original, value, taken)
                elif stand_in is not None and original is value:
                    _put(module, name, original, stand_in, taken)


def give_back(taken: list[Placed]) -> None:
    """Puts the originals back, where nobody else listens."""
    with _lock:
        while taken:
            placed = taken.pop()
            placed.users -= 1
            if not placed.users:
                del _placed[id(placed.place), placed.name]
                if placed.place.get(placed.name) is placed.stand_in:
                    placed.place[placed.name] = placed.original


def _put(
    place: dict[str, Any], name: str, original: Any, stand_in: Any, taken: list[Placed]
) -> None:
    key = (id(place), name)
    if key not in _placed:
        _placed[key] = Placed(place, name, original, stand_in)
    _placed[key].users += 1
    taken.append(_placed[key])
    place[name] = stand_in


def _originals() -> Iterator[tuple[dict[str, Any], str, str, Any]]:
    for module, kind, names in _WATCHED:
        for name in names.split():
            held = _placed.get((id(vars(module)), name))
            original = vars(module).get(name)
            if held is not None and original is held.stand_in:
                original = held.original
            if original is not None:
                yield vars(module), kind, name, original


def _stand_in(place: dict[str, Any], kind: str, name: str, original: Any) -> Any:
    made = _made.get((id(place), name))
    if made is None or made[0] is not original:  # somebody has put another function there since
        called = name if place is vars(builtins) else f"{place['__name__']}.{name}"
        made = _made[id(place), name] = (original, _telling(original, kind, called))
    return made[1]


def _telling(original: Any, kind: str, called: str) -> Any:
    """A function that does what `original` does, and tells of it."""

    @functools.wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        listeners = reversed(heard.copy())
        wanted = next((each for each in listeners if each.calling(kind, called, frame)), None)
        result = original(*args, **kwargs)
        if wanted is not None:
            wanted.called(kind, called, frame, result)
        return result

    found: Any = stand_in
    found.stands_for = called
    if called != "print":  # of which AutoGraph has its own idea; it is to leave the others alone
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
    """A class of `datetime` that is the same, but tells of being asked for now."""

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
            asked = _telling(getattr(original, name), kind, f"{called}.{name}")
            setattr(Clock, name, staticmethod(asked))
    Clock.__name__ = Clock.__qualname__ = original.__name__
    return Clock
