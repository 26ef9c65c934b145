"""Python that runs while a step is traced, and never again: found, with its line.

    names that draw, print or read the clock     lead here while the step is traced; a call from the
                                                 user's code is noted
    lists, dicts, attributes, globals around it  compared before and after (`_changes`)

Code of libraries may do what it likes, and so may `build` and `__init__`, which are meant to run
once.
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
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from trainstep import _site
from trainstep._advice import Effect
from trainstep._changes import Changes
from trainstep._errors import SideEffectError
from trainstep._reach import Reach

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
    (random, "random", "random"),
    (np.random, "random", _NUMPY),
    (os, "random", "urandom"),
    (uuid, "random", "uuid1 uuid4"),
    (secrets, "random", "token_bytes token_hex token_urlsafe randbelow choice randbits"),
    (time, "clock", _TIMES),
    (builtins, "print", "print"),
    (builtins, "file", "input open"),
]
_ONCE = ("build", "__init__", "setup")


class Observer:
    """Watches one trace.

    Args:
        function: The name of the step, for messages.
        reach: What the step reaches.
        is_tensor: Tells a tensor.
        raises: Whether the first thing found raises a `SideEffectError`.
    """

    def __init__(
        self, function: str, reach: Reach, is_tensor: Callable[[Any], bool], *, raises: bool
    ) -> None:
        self._function, self._reach = function, reach
        self._raises = raises
        self._thread = threading.get_ident()
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._changes = Changes(reach, is_tensor)
        self._noted: dict[tuple[str, str, int], Effect] = {}

    def __enter__(self) -> Observer:
        stand_ins: dict[int, tuple[Any, Any]] = {}
        for module, kind, names in _WATCHED:
            for name in names.split() if module is not random else _RANDOM:
                original = vars(module).get(name)
                if original is not None:
                    stand_in = self._stand_in(original, module, name, kind)
                    stand_ins[id(original)] = (original, stand_in)
                    self._put(vars(module), name, stand_in)
        for name in ("datetime", "date"):
            original = getattr(datetime, name)
            stand_ins[id(original)] = (original, self._clock(original))
            self._put(vars(datetime), name, stand_ins[id(original)][1])
        for module in self._reach.modules.values():  # `from random import gauss`
            for name, value in list(module.items()):
                known = stand_ins.get(id(value))
                if known is not None and known[0] is value:
                    self._put(module, name, known[1])
        return self

    def __exit__(self, *exception: object) -> None:
        for place, name, original, stand_in in reversed(self._replaced):
            if place.get(name) is stand_in:
                place[name] = original
        self._replaced.clear()

    def noticed(self, effects: Iterable[Effect]) -> None:
        """Takes in what was found elsewhere."""
        for effect in effects:
            self._note(effect)

    def found(self) -> list[Effect]:
        """What the step did, after it was traced."""
        self.noticed(self._changes.found())
        self._changes.forget()
        return list(self._noted.values())

    def _put(self, place: Any, name: str, stand_in: Any) -> None:
        self._replaced.append((place, name, place[name], stand_in))
        place[name] = stand_in

    # Calls ----------------------------------------------------------------------------------

    def _stand_in(self, original: Any, module: Any, name: str, kind: str) -> Any:
        called = name if module is builtins else f"{module.__name__}.{name}"

        @functools.wraps(original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            mine = self._is_the_steps(frame)
            if mine and self._raises:
                self._note_call(kind, called, frame, "")
            result = original(*args, **kwargs)
            if mine:
                shown = "" if result is None else f" {_short(result)}"
                self._note_call(kind, called, frame, shown)
            return result

        return stand_in

    def _clock(self, original: Any) -> Any:
        """A stand-in for a class of `datetime`: the same, but that asking for now is noted."""
        observer = self

        class Kind(type(original)):  # type: ignore[misc]
            def __instancecheck__(cls, value: Any) -> bool:
                return isinstance(value, original)

            def __subclasscheck__(cls, kind: Any) -> bool:
                return issubclass(kind, original)

        class Clock(original, metaclass=Kind):  # type: ignore[misc]
            def __new__(cls, *args: Any, **kwargs: Any) -> Any:
                return original(*args, **kwargs)

        def asked(name: str) -> Any:
            def now(*args: Any, **kwargs: Any) -> Any:
                result = getattr(original, name)(*args, **kwargs)
                frame = sys._getframe(1)
                if observer._is_the_steps(frame):
                    called = f"datetime.{original.__name__}.{name}"
                    observer._note_call("clock", called, frame, f" {result}")
                return result

            return staticmethod(now)

        for name in ("now", "utcnow", "today"):
            if hasattr(original, name):
                setattr(Clock, name, asked(name))
        Clock.__name__ = Clock.__qualname__ = original.__name__
        return Clock

    def _is_the_steps(self, frame: Any) -> bool:
        return (
            threading.get_ident() == self._thread
            and _site.is_users(frame)
            and frame.f_code.co_name not in _ONCE
        )

    def _note_call(self, kind: str, called: str, frame: Any, value: str) -> None:
        self._note(
            Effect(kind, f"calls `{called}`", frame.f_code.co_filename, frame.f_lineno, value)
        )

    def _note(self, effect: Effect) -> None:
        self._noted.setdefault((effect.what, effect.file, effect.line), effect)
        if self._raises:
            self._changes.undo()
            raise SideEffectError(effect.message(self._function))


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:37]}..."


_RANDOM = [  # the functions of the hidden generator
    name
    for name, value in vars(random).items()
    if callable(value) and getattr(value, "__self__", None) is random._inst
]
