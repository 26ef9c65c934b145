"""Helpers for testing code that uses trainstep."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from trainstep._engines.null import NullEngine
from trainstep._engines.shared.padding import filling
from trainstep._function.function import Function
from trainstep._function.sizes.background import wait as wait_for_compilation

__all__ = ["NullEngine", "assert_traces", "filling", "wait_for_compilation"]


@contextlib.contextmanager
def assert_traces(function: Function[..., object], count: int) -> Iterator[None]:
    """Checks that the block traces `function` exactly `count` times, and shows why if not.

    Example:
        >>> import numpy as np, trainstep as ts
        >>> from trainstep.testing import assert_traces
        >>> double = ts.function(lambda x: 2 * x)
        >>> with assert_traces(double, 1):
        ...     _ = double(np.zeros(3)), double(np.ones(3))
    """
    before = len(function.ledger)
    yield
    new = [event for event in function.ledger[before:] if event.runs_python]
    assert len(new) == count, (
        f"`{function.__name__}` was traced {len(new)} times, not {count}:\n"
        + "\n".join(f"  {event}" for event in new)
    )
