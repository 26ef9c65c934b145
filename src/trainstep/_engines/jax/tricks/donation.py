"""Trick: calls of a program in one piece, which lets it update variables in place.

A program that updates its variables in place takes their arrays: until the new ones are stored, the
variables hold nothing. JAX's own way to call a compiled program has a Python frame around its entry
in C++, and Ctrl-C could fall in there. The entry alone is one call in C.

Off, or with a JAX that has no such entry: `FastExecutable` calls the program in Python, on copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def atomic_call(compiled: Any) -> Callable[..., Any] | None:
    """A compiled program's entry in C++, or None where there is none."""
    try:
        found: Callable[..., Any] | None = compiled._executable.create_cpp_call(compiled._params)
    except AttributeError:
        return None
    return found
