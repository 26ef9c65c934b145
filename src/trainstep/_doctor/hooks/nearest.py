"""Compares a signature with the nearest earlier one: the differences are the causes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainstep._doctor.hooks.function_identity import one_line
from trainstep._doctor.records import Cause
from trainstep._explain.signature import Part, Signature, array_text, nearest

STRUCTURE_LABEL = "structure of the arguments"  # shown if no part can be named
_SHOWN = 4  # causes per kind
_WIDE = 60


def array_part(label: str, aval: Any) -> Part:
    """A JAX array as a part of a signature."""
    shape, dtype = getattr(aval, "shape", None), str(getattr(aval, "dtype", ""))
    if shape is None:
        return Part(label, one_line(aval), "static", one_line(aval))
    weak = bool(getattr(aval, "weak_type", False))
    text = array_text(tuple(shape), dtype) + (" from a Python number" if weak else "")
    token = (tuple(shape), dtype, weak, str(getattr(aval, "sharding", "")))
    return Part(label, text, "array", token)


def compare_with_earlier(
    new: Signature, earlier: Sequence[Signature]
) -> tuple[int | None, list[Cause]]:
    """The index of the nearest earlier signature, and the causes."""
    index, changes = nearest(new, earlier)
    causes = [Cause(change.kind, change.text) for change in changes]
    if any(
        c.kind in ("structure", "static") and not c.text.startswith(STRUCTURE_LABEL) for c in causes
    ):
        causes = [cause for cause in causes if not cause.text.startswith(STRUCTURE_LABEL)]
    for kind in ("flag", "structure"):  # the other differences follow from these
        causes = [cause for cause in causes if cause.kind == kind] or causes
    return index, _first_of_each_kind(
        [Cause(kind, _cut_to_difference(text)) for kind, text in causes]
    )


def _cut_to_difference(text: str) -> str:
    """A text about a long structure, cut to the brackets around the difference."""
    label, _, rest = text.partition(": ")
    before, arrow, after = rest.partition(" -> ")
    if not arrow or not before.startswith("("):
        return text
    pairs = enumerate(zip(before, after, strict=False))
    start = next((i for i, (a, b) in pairs if a != b), min(len(before), len(after)))
    opening = _opening(before, start)
    return f"{label}: {_bracket(before[opening:])} -> {_bracket(after[opening:])}"


def _opening(text: str, end: int) -> int:
    """The index of the innermost bracket that is open at `end`."""
    closed = 0
    for index in range(end - 1, -1, -1):
        if text[index] in ")]}":
            closed += 1
        elif text[index] in "([{":
            if not closed:
                return index
            closed -= 1
    return 0


def _bracket(text: str) -> str:
    """A text up to the bracket that closes its first one, shortened if it is long."""
    depth = 0
    for index, character in enumerate(text[:_WIDE]):
        depth += (character in "([{") - (character in ")]}")
        if not depth:
            return text[: index + 1]
    return text[: _WIDE - 3] + "..."


def _first_of_each_kind(causes: list[Cause]) -> list[Cause]:
    """The first few causes of each kind, and the number of the others."""
    shown: list[Cause] = []
    left: dict[str, int] = {}
    for cause in causes:
        if sum(each.kind == cause.kind for each in shown) < _SHOWN:
            shown.append(cause)
        else:
            left[cause.kind] = left.get(cause.kind, 0) + 1
    return [*shown, *(Cause(kind, f"and {count} more") for kind, count in left.items())]
