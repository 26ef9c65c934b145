"""Trick: calls a program by its C++ entry, so that it can update variables in place.

Donation deletes the variables' arrays: until the new ones are stored, the variables have no value.
JAX calls a compiled program through a Python frame, where Ctrl-C could interrupt. Its C++ entry is
one call in C, which cannot be interrupted. The gain: no copy of the variables in each step.

It does not apply to a JAX without such an entry: `FastExecutable` then runs the program in Python,
on copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def atomic_call(compiled: Any) -> Callable[..., Any] | None:
    """Returns a compiled program's C++ entry, or None if it has none."""
    try:
        found: Callable[..., Any] | None = compiled._executable.create_cpp_call(compiled._params)
    except AttributeError:
        return None
    return found
