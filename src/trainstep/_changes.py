"""What a step changed around it while it was traced: looked at before and after."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from trainstep._advice import Effect
from trainstep._arguments import structure
from trainstep._bytecode import changed_at
from trainstep._places import Place, is_generator
from trainstep._reach import GONE, Reach

_COMPARED = 1 << 24  # bytes of an array


class Changes:
    """Holds what the places around a step were before it was traced.

    Args:
        reach: What the step reaches.
        is_tensor: Tells a tensor.
    """

    def __init__(self, reach: Reach, is_tensor: Callable[[Any], bool]) -> None:
        self._is_tensor = is_tensor
        self._looks = [(place, look, look()) for place, look in _looks(reach)]

    def found(self) -> Iterator[Effect]:
        """What is different now."""
        for place, look, before in self._looks:
            after = look()
            if _same(before, after):
                continue
            if isinstance(before, str):
                yield Effect("random", f"draws from {place.label}", place.file, place.line)
                continue
            left = self._left(before, after)
            yield Effect("write", f"changes {place.label}", place.file, place.line, left)

    def _left(self, before: list[Any], after: list[Any]) -> str:
        """Names tensors of the trace that stay where they were put."""
        old = set(map(id, before))
        new = [x for x in after if id(x) not in old and self._is_tensor(x)]
        left = [x for x in new if not isinstance(x, (np.ndarray, np.generic))]
        if not left:
            return ""
        kind = type(left[0]).__name__
        return f" (it left a {kind} of the trace there, which has no value of any step)"


class Given:
    """The structures among the arguments of a step, which are copies that nobody sees again."""

    def __init__(self, names: Sequence[str], arguments: Sequence[Any]) -> None:
        self._held = [(name, held, _flat(held)) for name, held in _structures(names, arguments)]

    def grown(self, fn: Any) -> Iterator[Effect]:
        """What the step put into one of them."""
        for name, held, before in self._held:
            old = set(map(id, before))
            if any(id(x) not in old for x in _flat(held)):
                code = getattr(inspect.unwrap(fn), "__code__", None)
                line = 0 if code is None else changed_at(code, name.partition("[")[0])
                file = "<unknown>" if code is None else code.co_filename
                yield Effect("argument", f"changes argument `{name}`", file, line)


def _structures(names: Sequence[str], values: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for name, value in zip(names, values, strict=True):
        if isinstance(value, (list, dict)):
            yield name, value
        children = structure(value) or ()
        yield from _structures([f"{name}{n}" for n, _ in children], [c for _, c in children])


Look = Callable[[], Any]


def _looks(reach: Reach) -> Iterator[tuple[Place, Look]]:
    """The places that may change, and the way to look at each: a list, or a text."""
    lines: dict[int, Place] = {}
    for write in reach.writes:
        kind, key = write.key
        if write.owner is None:
            yield write.place, partial(_named, reach, write.place.text)
        elif kind == "attr":
            own = getattr(write.owner.value, "__dict__", {})
            yield write.place, partial(_attribute, own, key)
        else:
            lines.setdefault(id(write.owner.value), write.place)
    for number, place in reach.containers.items():
        found = lines.get(number, place)
        if is_generator(place.value):
            yield found, partial(_state_of, place.value)
        elif not isinstance(place.value, np.ndarray):
            yield found, partial(_flat, place.value)
        elif number in lines and place.value.nbytes <= _COMPARED:
            yield found, partial(_bytes, place.value)


def _named(reach: Reach, text: str) -> list[Any]:
    return [reach.value(text)]


def _attribute(own: dict[str, Any], name: str) -> list[Any]:
    return [own.get(name, GONE)]


def _bytes(array: Any) -> list[bytes]:
    return [array.tobytes()]


def _flat(held: Any) -> list[Any]:
    return [x for pair in held.items() for x in pair] if isinstance(held, dict) else list(held)


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, str):
        return bool(before == after)
    return len(before) == len(after) and all(
        a is b or (isinstance(a, bytes) and a == b) for a, b in zip(before, after, strict=True)
    )


def _state_of(source: Any) -> str:
    """The state of a random generator."""
    if isinstance(source, np.random.Generator):
        return repr(source.bit_generator.state)
    return repr(source.getstate() if isinstance(source, random.Random) else source.get_state())
