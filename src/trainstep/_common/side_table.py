"""A side table keyed by weak identity: an entry disappears with its object.

Nothing is written into the object, so copies, pickles and comparisons of it do not change.
"""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SideTable(Generic[T]):
    """Maps objects to values without keeping the objects alive."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], T]] = {}

    def get(self, owner: Any) -> T | None:
        """The value of an object; None if it has none."""
        entry = self._entries.get(id(owner))
        return entry[1] if entry is not None and entry[0]() is owner else None

    def set(self, owner: Any, value: T) -> None:
        """Sets the value of an object."""
        key = id(owner)

        def forget(ref: weakref.ref[Any]) -> None:
            # A new object may have taken the id, and the entry, of the one that died.
            entry = self._entries.get(key)
            if entry is not None and entry[0] is ref:
                del self._entries[key]

        self._entries[key] = (weakref.ref(owner, forget), value)
