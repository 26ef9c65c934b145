"""What a compiler may depend on in one call, and how two calls differ.

A `Signature` is a list of named parts, each with a text that a person can read: the shape and
dtype of an array, a static value, the identity of an object, a trainable flag. It is made only
when a call misses the cache; a hit compares the cheap key of `_arguments.py` instead.

    parts of a call + earlier signatures --nearest--> the one with the fewest differences
                                         --changes--> "x: float32[32,4] -> float32[17,4]"
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

ABSENT = "absent"
# What a trace turns out to depend on, besides the arguments.
_FOUND = ("flag", "capture")
_ASPECTS = ("shape", "dtype", "weak", "sharding")  # of an array, in the order of its token


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that a program was compiled for.

    `token` decides equality; `text` is what is shown. Two models may have one name.
    """

    label: str
    text: str
    kind: str  # array, or a key of `_cures.CURES`
    token: Hashable

    def __str__(self) -> str:
        return f"{self.label}: {self.text}"


@dataclass(frozen=True, slots=True)
class Change:
    """A part that differs between two signatures."""

    kind: str  # a key of `_cures.CURES`
    text: str


class Signature:
    """The parts of one call, in the order of the arguments; then what the trace depends on."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = {part.label: part for part in parts}

    def __str__(self) -> str:
        shown = [str(p) for p in self.parts.values() if p.kind not in _FOUND]
        return ", ".join(shown) or "no arguments"

    def with_found(self, found: Iterable[Part]) -> Signature:
        """The same call with the flags and values that the trace turned out to depend on."""
        kept = [p for p in self.parts.values() if p.kind not in _FOUND]
        return Signature([*kept, *found])

    def changes(self, earlier: Signature) -> list[Change]:
        """What is different here, part by part."""
        found = [_change(earlier.parts.get(p.label), p) for p in self.parts.values()]
        gone = [_change(p, None) for label, p in earlier.parts.items() if label not in self.parts]
        return [change for change in (*found, *gone) if change is not None]


def _change(old: Part | None, new: Part | None) -> Change | None:
    part = new or old
    assert part is not None
    if old is None or new is None:
        # What only one of two traces read says nothing about why they differ.
        if part.kind in _FOUND:
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
    """What it is about an array that differs."""
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

    The latest wins a tie: it is the one that the user remembers. None stands for no signature.
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
    """Names made distinct: two models may have a layer of one name each."""
    count: dict[str, int] = {}
    distinct = []
    for name in names:
        count[name] = count.get(name, 0) + 1
        distinct.append(name if count[name] == 1 else f"{name} ({count[name]})")
    return distinct


def array_text(shape: Sequence[int | str | None], dtype: str) -> str:
    """`float32[32,4]`, with `?` or a name for any size."""
    return f"{dtype}[{','.join('?' if d is None else str(d) for d in shape)}]"
