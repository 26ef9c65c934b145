"""What a step takes from around it: looked at before it is traced, and after.

reached --> what its code leads to
taken   --> of that, the values that the step read and left alone: they are in the program now
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

from trainstep._surroundings.captures import Captures
from trainstep._surroundings.places import SCALARS
from trainstep._surroundings.reach import Reach


def reached(fn: Any, values: Sequence[Any], uses: Callable[[], Sequence[Any]]) -> Reach:
    """What a step reaches in Python, as far as it can be followed.

    Args:
        fn: The step.
        values: The arguments of a call, in the order of its parameters.
        uses: Objects that it uses and that its code does not tell.
    """
    found = Reach()
    try:
        found.step(fn, values)
        for each in uses():
            found.object(each)
    except Exception as error:  # a step that cannot be read can still be trained
        found.missed.append(f"{type(error).__name__}: {error}")
    return found


def taken(before: Reach, after: Reach) -> Captures:
    """The values that a step took from around it, and did not change itself."""
    earlier = {place.text: place.value for place in before.places.values()}
    written = {write.place.text for write in after.writes}
    owners = [write.owner.value for write in after.writes if write.owner is not None]
    changed = {id(owner) for owner in owners if not isinstance(owner, SCALARS)}
    steady = [
        place
        for place in after.places.values()
        if place.text not in written
        and id(place.value) not in changed
        and _is_still(place.value, earlier.get(place.text, place.value))
    ]
    return Captures(steady, after.names)


def _is_still(value: Any, before: Any) -> bool:
    return value is before or (isinstance(value, types.MethodType) and value == before)
