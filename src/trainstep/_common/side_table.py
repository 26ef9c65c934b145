"""What is kept beside an object: found by identity, and gone when the object is.

Nothing is written into the object, which may be copied, pickled or compared by its values.
"""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Beside(Generic[T]):
    """A value for each of some objects, none of which is held."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], T]] = {}

    def get(self, owner: Any) -> T | None:
        """The value of an object; None if it has none."""
        entry = self._entries.get(id(owner))
        return entry[1] if entry is not None and entry[0]() is owner else None

    def set(self, owner: Any, value: T) -> None:
        """Gives an object a value."""
        key = id(owner)

        def forget(ref: weakref.ref[Any]) -> None:
            entry = self._entries.get(key)
            if entry is not None and entry[0] is ref:
                del self._entries[key]

        self._entries[key] = (weakref.ref(owner, forget), value)
