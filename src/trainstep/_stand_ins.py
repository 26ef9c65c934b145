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
    "uniform vonmises wald weibull zipf RandomState"
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


heard: list[Listener] = []  # the last one listens
_made: dict[tuple[int, str], tuple[Any, Any]] = {}


def replace(modules: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str, Any, Any]]:
    """Puts stand-ins in place, also where `modules` took a name (`from random import gauss`).

    Yields:
        Each dict, name, original and stand-in, before it is put there.
    """
    known: dict[int, tuple[Any, Any]] = {}
    for place, kind, name, original in _originals():
        stand_in = _stand_in(place, kind, name, original)
        known[id(original)] = (original, stand_in)
        yield place, name, original, stand_in
        place[name] = stand_in
    # Other threads look into the module `datetime`, too: it is replaced in the user's names only.
    known |= {id(original): (original, stand_in) for original, stand_in in _clocks()}
    for module in modules:
        for name, value in list(module.items()):
            original, stand_in = known.get(id(value), (None, None))
            if stand_in is not None and original is value:
                yield module, name, original, stand_in
                module[name] = stand_in


def _originals() -> Iterator[tuple[dict[str, Any], str, str, Any]]:
    for module, kind, names in _WATCHED:
        for name in names.split():
            original = vars(module).get(name)
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
        listener = heard[-1] if heard else None
        wanted = listener is not None and listener.calling(kind, called, frame)
        result = original(*args, **kwargs)
        if listener is not None and wanted:
            listener.called(kind, called, frame, result)
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
