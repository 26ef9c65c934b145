"""The signature of a call, and the differences between two signatures.

A `Signature` is a list of named parts, each with a readable text: the shape and dtype of an array,
a static value, the identity of an object, a trainable flag. It is built for cache misses only; a
cache hit compares the cheap key of `_function/arguments.py` instead.

    parts of a call + earlier signatures --nearest--> the one with the fewest differences
                                         --changes--> "x: float32[32,4] -> float32[17,4]"
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

ABSENT = "absent"
# The kinds of parts that only a trace reveals, besides the arguments.
_REVEALED = ("flag", "capture")
_ASPECTS = ("shape", "dtype", "weak", "sharding")  # of an array, in the order of its token


@dataclass(frozen=True, slots=True)
class Part:
    """One input or value that a program was compiled for.

    `token` decides equality, `text` is shown: two models may have the same name.
    """

    label: str
    text: str
    kind: str  # array, or a key of `causes.CURES`
    token: Hashable

    def __str__(self) -> str:
        return f"{self.label}: {self.text}"


@dataclass(frozen=True, slots=True)
class Change:
    """A part that differs between two signatures."""

    kind: str  # a key of `causes.CURES`
    text: str


class Signature:
    """The parts of one call: the arguments in order, then the parts that the trace revealed."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = {part.label: part for part in parts}

    def __str__(self) -> str:
        shown = [str(p) for p in self.parts.values() if p.kind not in _REVEALED]
        return ", ".join(shown) or "no arguments"

    def with_found(self, found: Iterable[Part]) -> Signature:
        """The same call with the flags and captured values that the trace revealed."""
        kept = [p for p in self.parts.values() if p.kind not in _REVEALED]
        return Signature([*kept, *found])

    def changes(self, earlier: Signature) -> list[Change]:
        """The differences from an earlier signature, part by part."""
        found = [_change(earlier.parts.get(p.label), p) for p in self.parts.values()]
        gone = [_change(p, None) for label, p in earlier.parts.items() if label not in self.parts]
        return [change for change in (*found, *gone) if change is not None]


def _change(old: Part | None, new: Part | None) -> Change | None:
    part = new or old
    assert part is not None
    if old is None or new is None:
        # A flag or captured value that only one of the two traces read explains nothing.
        if part.kind in _REVEALED:
            return None
    elif old.token == new.token:
        return None
    before = old.text if old else ABSENT
    after = new.text if new else ABSENT
    if before == after:
        after = f"another {after}"
    label = f"argument {part.label}" if part.kind in ("object", "static") else part.label
    return Change(_kind(part.kind, old, new), f"{label}: {before} -> {after}")


def _kind(kind: str, old: Part | None, new: Part | None) -> str:
    """The aspect of an array that differs; other kinds stay as they are."""
    if kind != "array":
        return kind
    if old is None or new is None or old.kind != new.kind:
        return "structure"
    if not (isinstance(old.token, tuple) and isinstance(new.token, tuple)):
        return "shape"
    differs = {n for n, a, b in zip(_ASPECTS, old.token, new.token, strict=False) if a != b}
    return next((each for each in ("dtype", *_ASPECTS) if each in differs), "shape")


def nearest(new: Signature, earlier: Sequence[Signature | None]) -> tuple[int | None, list[Change]]:
    """The index of the earlier signature with the fewest differences, and those differences.

    The latest wins a tie: the user remembers it best. None in `earlier` is skipped.
    """
    best: int | None = None
    fewest: list[Change] = []
    for index, signature in enumerate(earlier):
        if signature is None:
            continue
        changes = new.changes(signature)
        if best is None or len(changes) <= len(fewest):
            best, fewest = index, changes
    return best, fewest


def distinct(names: Iterable[str]) -> list[str]:
    """Numbers repeated names: two models may each have a layer of the same name."""
    count: dict[str, int] = {}
    distinct = []
    for name in names:
        count[name] = count.get(name, 0) + 1
        distinct.append(name if count[name] == 1 else f"{name} ({count[name]})")
    return distinct


def array_text(shape: Sequence[int | str | None], dtype: str) -> str:
    """`float32[32,4]`, with `?` or a name for a dynamic size."""
    return f"{dtype}[{','.join('?' if d is None else str(d) for d in shape)}]"
