"""Temporarily replaces third-party functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# An owner, the name of its function, and a wrapper that takes the original.
Replacement = tuple[Any, str, Callable[[Any], Any]]


@contextlib.contextmanager
def replaced(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Installs wrappers, and restores the originals at the end, also after an exception."""
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
