"""Why a function was traced again: the earlier signature that is nearest, and what differs."""

from __future__ import annotations

from collections.abc import Sequence

from trainstep._doctor._records import Cause
from trainstep._signature import Signature, nearest

_SHOWN = 4  # causes of one kind


def why(new: Signature, earlier: Sequence[Signature]) -> tuple[int | None, list[Cause]]:
    """The index of the nearest earlier signature, and the causes."""
    index, changes = nearest(new, earlier)
    causes = [Cause(change.kind, change.text) for change in changes]
    structure = [cause for cause in causes if cause.kind == "structure"]
    return index, _folded(structure or causes)


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
