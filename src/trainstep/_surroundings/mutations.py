"""What a step changed around it while it was traced: looked at before and after."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from trainstep._common.structure import structure
from trainstep._explain.causes import Effect
from trainstep._surroundings.bytecode import changed_at
from trainstep._surroundings.places import Place
from trainstep._surroundings.reach import Reach
from trainstep._surroundings.value_kinds import GONE, is_generator

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
            if _same(before, after) or _is_made_once(before, after):
                continue
            if isinstance(before, str):
                yield Effect("random", f"draws from {place.label}", place.file, place.line)
                continue
            left = self._left(before, after)
            what = f"changes {place.label}"
            yield Effect("write", what, place.file, place.line, left, bool(left))

    def forget(self) -> None:
        """Lets go of everything."""
        self._looks.clear()

    def undo(self) -> None:
        """Puts everything back as it was."""
        for _, look, before in self._looks:
            if not _same(before, look()):
                look.undo(before)

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
        found = _structures(names, arguments)
        self._held = [(name, look, look()) for name, look in found]

    def grown(self, fn: Any) -> Iterator[Effect]:
        """What the step put into one of them."""
        for name, look, before in self._held:
            old = set(map(id, before))
            if any(id(x) not in old for x in look()):
                code = getattr(inspect.unwrap(fn), "__code__", None)
                line = 0 if code is None else changed_at(code, name.partition("[")[0])
                file = "<unknown>" if code is None else code.co_filename
                yield Effect("argument", f"changes argument `{name}`", file, line)


def _structures(names: Sequence[str], values: Sequence[Any]) -> Iterator[tuple[str, _Look]]:
    for name, value in zip(names, values, strict=True):
        if isinstance(value, (list, dict)):
            yield name, _Look(value)
        children = structure(value) or ()
        yield from _structures([f"{name}{n}" for n, _ in children], [c for _, c in children])


class _Look:
    """The way to look at a place, and to put it back: an attribute, a container, a generator."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def __call__(self) -> Any:
        """What is there: a list of it, or a text."""
        held = self._held
        return [x for pair in held.items() for x in pair] if isinstance(held, dict) else list(held)

    def undo(self, before: Any) -> None:
        """Puts it back."""
        held = self._held
        held.clear()
        if isinstance(held, dict):
            held.update(zip(before[::2], before[1::2], strict=True))
        else:
            (held.update if isinstance(held, set) else held.extend)(before)


class _Name(_Look):
    """A global, or an attribute: a key of a dict."""

    def __init__(self, held: Any, name: str) -> None:
        super().__init__(held)
        self._name = name

    def __call__(self) -> Any:
        return [self._held.get(self._name, GONE)]

    def undo(self, before: Any) -> None:
        if before[0] is GONE:
            self._held.pop(self._name, None)
        else:
            self._held[self._name] = before[0]


class _ClassAttribute(_Name):
    def undo(self, before: Any) -> None:
        if before[0] is GONE:
            delattr(self._held, self._name)
        else:
            setattr(self._held, self._name, before[0])

    def __call__(self) -> Any:
        return [vars(self._held).get(self._name, GONE)]


class _Cell(_Look):
    def __call__(self) -> Any:
        return [self._held.cell_contents]

    def undo(self, before: Any) -> None:
        self._held.cell_contents = before[0]


class _Array(_Look):
    def __call__(self) -> Any:
        return [self._held.tobytes()]

    def undo(self, before: Any) -> None:
        np.copyto(self._held, np.frombuffer(before[0], self._held.dtype).reshape(self._held.shape))


class _Generator(_Look):
    def __call__(self) -> Any:
        return repr(self._state())

    def _state(self) -> Any:
        held = self._held
        if isinstance(held, np.random.Generator):
            return held.bit_generator.state
        return held.getstate() if isinstance(held, random.Random) else held.get_state()

    def undo(self, before: Any) -> None:
        """Numbers that were drawn are drawn; nobody else is worse off."""


def _looks(reach: Reach) -> Iterator[tuple[Place, _Look]]:
    """The places that may change, and the way to look at each."""
    lines: dict[int, Place] = {}
    for write in reach.writes:
        kind, key = write.key
        if write.owner is None:
            look = reach.cell(write.place.text)
            yield write.place, _Cell(look) if look else _Name(reach.globals(write.place.text), key)
        elif kind == "attr":
            owner = write.owner.value
            if isinstance(owner, type):
                yield write.place, _ClassAttribute(owner, key)
            elif hasattr(owner, "__dict__"):
                yield write.place, _Name(vars(owner), key)
        else:
            lines.setdefault(id(write.owner.value), write.place)
    for number, place in reach.containers.items():
        found = lines.get(number, place)
        if is_generator(place.value):
            yield found, _Generator(place.value)
        elif not isinstance(place.value, np.ndarray):
            yield found, _Look(place.value)
        elif number in lines and place.value.nbytes <= _COMPARED:
            yield found, _Array(place.value)


def _is_made_once(before: Any, after: Any) -> bool:
    """Whether a variable was made where there was none, or a flag says that all is built now."""
    if len(before) != 1 or not any(before[0] is each for each in (None, GONE, False)):
        return False
    if before[0] is False and after[0] is True:
        return True
    return hasattr(after[0], "assign") and hasattr(after[0], "dtype")


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, str):
        return bool(before == after)
    return len(before) == len(after) and all(
        a is b or (isinstance(a, bytes) and a == b) for a, b in zip(before, after, strict=True)
    )
