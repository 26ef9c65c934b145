"""Functions of others led through ours for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# An owner, the name of a function of its, and what makes ours of the original.
Replacement = tuple[Any, str, Callable[[Any], Any]]


@contextlib.contextmanager
def replaced(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Puts ours in place of functions, and the originals back in the end, whatever happens."""
    originals = [getattr(owner, name, None) for owner, name, _ in replacements]
    try:
        for (owner, name, make), original in zip(replacements, originals, strict=True):
            setattr(owner, name, make(original))
        yield
    finally:
        for (owner, name, _), original in zip(replacements, originals, strict=True):
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
