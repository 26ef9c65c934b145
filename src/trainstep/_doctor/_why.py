"""Why a function was traced again: the earlier signature that is nearest, and what differs."""

from __future__ import annotations

from collections.abc import Sequence

from trainstep._doctor._records import Cause
from trainstep._signature import Signature, nearest

_SHOWN = 4  # causes of one kind
_WIDE = 60
_CONTEXT = 12  # characters around what differs


def why(new: Signature, earlier: Sequence[Signature]) -> tuple[int | None, list[Cause]]:
    """The index of the nearest earlier signature, and the causes."""
    index, changes = nearest(new, earlier)
    causes = [Cause(change.kind, change.text) for change in changes]
    for kind in ("flag", "structure"):  # from which the others follow
        causes = [cause for cause in causes if cause.kind == kind] or causes
    return index, _folded([Cause(kind, _around(text)) for kind, text in causes])


def _around(text: str) -> str:
    """A text about a long structure, cut to what differs."""
    label, _, rest = text.partition(": ")
    before, arrow, after = rest.partition(" -> ")
    if not arrow or max(len(before), len(after)) <= _WIDE:
        return text
    start = _common(before, after)
    end = _common(before[start:][::-1], after[start:][::-1])
    first, last = max(start - _CONTEXT, 0), max(end - _CONTEXT, 0)
    cut = [each[first : len(each) - last][:_WIDE] for each in (before, after)]
    return f"{label}: ...{cut[0]}... -> ...{cut[1]}..."


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _folded(causes: list[Cause]) -> list[Cause]:
    """The first few of each kind."""
    shown: list[Cause] = []
    left: dict[str, int] = {}
    for cause in causes:
        if sum(each.kind == cause.kind for each in shown) < _SHOWN:
            shown.append(cause)
        else:
            left[cause.kind] = left.get(cause.kind, 0) + 1
    return [*shown, *(Cause(kind, f"and {count} more") for kind, count in left.items())]
