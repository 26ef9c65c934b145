"""Finds the values around a step that a trace changed, by comparing them before and after."""

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

_MAX_BYTES = 1 << 24  # of an array that is compared


class Mutations:
    """Snapshots of the mutable values around a step, from before a trace.

    Args:
        reach: The values in reach of the step.
        is_tensor: Whether a value is a tensor.
    """

    def __init__(self, reach: Reach, is_tensor: Callable[[Any], bool]) -> None:
        self._is_tensor = is_tensor
        self._mutables = [(place, mutable, mutable()) for place, mutable in _mutables(reach)]

    def found(self) -> Iterator[Effect]:
        """The differences between the snapshots and now, as side effects."""
        for place, mutable, before in self._mutables:
            after = mutable()
            if _same(before, after) or _is_lazy_initialization(before, after):
                continue
            if isinstance(before, str):
                yield Effect("random", f"draws from {place.label}", place.file, place.line)
                continue
            leaked = self._leaked(before, after)
            what = f"changes {place.label}"
            yield Effect("write", what, place.file, place.line, leaked, bool(leaked))

    def forget(self) -> None:
        """Drops the snapshots."""
        self._mutables.clear()

    def undo(self) -> None:
        """Restores every snapshot."""
        for _, mutable, before in self._mutables:
            if not _same(before, mutable()):
                mutable.undo(before)

    def _leaked(self, before: list[Any], after: list[Any]) -> str:
        """Describes a tensor of the trace that the step stored there; empty if there is none."""
        old = set(map(id, before))
        new = [x for x in after if id(x) not in old and self._is_tensor(x)]
        leaked = [x for x in new if not isinstance(x, (np.ndarray, np.generic))]
        if not leaked:
            return ""
        kind = type(leaked[0]).__name__
        return f" (it stored a {kind} of the trace there, which has no value)"


class ArgumentCopies:
    """The containers among a step's arguments: copies, so that a change to them is lost."""

    def __init__(self, names: Sequence[str], arguments: Sequence[Any]) -> None:
        found = _structures(names, arguments)
        self._held = [(name, mutable, mutable()) for name, mutable in found]

    def mutated(self, fn: Any) -> Iterator[Effect]:
        """The containers that the step added something to, as side effects."""
        for name, mutable, before in self._held:
            old = set(map(id, before))
            if any(id(x) not in old for x in mutable()):
                code = getattr(inspect.unwrap(fn), "__code__", None)
                line = 0 if code is None else changed_at(code, name.partition("[")[0])
                file = "<unknown>" if code is None else code.co_filename
                yield Effect("argument", f"changes argument `{name}`", file, line)


def _structures(names: Sequence[str], values: Sequence[Any]) -> Iterator[tuple[str, _Mutable]]:
    for name, value in zip(names, values, strict=True):
        if isinstance(value, (list, dict)):
            yield name, _Mutable(value)
        children = structure(value) or ()
        yield from _structures([f"{name}{n}" for n, _ in children], [c for _, c in children])


class _Mutable:
    """A mutable value: calling it takes a snapshot, `undo` restores one. Here, of a container."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def __call__(self) -> Any:
        """The snapshot: a list of the values, or a text."""
        held = self._held
        return [x for pair in held.items() for x in pair] if isinstance(held, dict) else list(held)

    def undo(self, before: Any) -> None:
        """Restores a snapshot."""
        held = self._held
        held.clear()
        if isinstance(held, dict):
            held.update(zip(before[::2], before[1::2], strict=True))
        else:
            (held.update if isinstance(held, set) else held.extend)(before)


class _DictEntry(_Mutable):
    """A global or an attribute: an entry of a dict."""

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


class _ClassAttribute(_DictEntry):
    def undo(self, before: Any) -> None:
        if before[0] is GONE:
            delattr(self._held, self._name)
        else:
            setattr(self._held, self._name, before[0])

    def __call__(self) -> Any:
        return [vars(self._held).get(self._name, GONE)]


class _Cell(_Mutable):
    def __call__(self) -> Any:
        return [self._held.cell_contents]

    def undo(self, before: Any) -> None:
        self._held.cell_contents = before[0]


class _Array(_Mutable):
    def __call__(self) -> Any:
        return [self._held.tobytes()]

    def undo(self, before: Any) -> None:
        np.copyto(self._held, np.frombuffer(before[0], self._held.dtype).reshape(self._held.shape))


class _Generator(_Mutable):
    def __call__(self) -> Any:
        return repr(self._state())

    def _state(self) -> Any:
        held = self._held
        if isinstance(held, np.random.Generator):
            return held.bit_generator.state
        return held.getstate() if isinstance(held, random.Random) else held.get_state()

    def undo(self, before: Any) -> None:
        """Does nothing: the state of a generator after some more numbers is as good."""


def _mutables(reach: Reach) -> Iterator[tuple[Place, _Mutable]]:
    """The mutable values in reach of a step, each with the place to report."""
    lines: dict[int, Place] = {}
    for write in (*reach.writes, *reach.possible_writes.values()):
        kind, key = write.key
        if write.owner is None:
            text = write.place.text
            cell = reach.cell(text)
            yield write.place, _Cell(cell) if cell else _DictEntry(reach.globals(text), key)
        elif kind == "attr":
            owner = write.owner.value
            if isinstance(owner, type):
                yield write.place, _ClassAttribute(owner, key)
            elif hasattr(owner, "__dict__"):
                yield write.place, _DictEntry(vars(owner), key)
        else:
            lines.setdefault(id(write.owner.value), write.place)
    for number, place in reach.containers.items():
        found = lines.get(number, place)
        if is_generator(place.value):
            yield found, _Generator(place.value)
        elif not isinstance(place.value, np.ndarray):
            yield found, _Mutable(place.value)
        elif number in lines and place.value.nbytes <= _MAX_BYTES:
            yield found, _Array(place.value)


def _is_lazy_initialization(before: Any, after: Any) -> bool:
    """Whether a variable was created where there was none, or a `built` flag was set."""
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
