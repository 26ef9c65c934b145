"""The layout of a trainer or function: that of its strategy, or of the surrounding scope."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from trainstep._common.errors import ArgumentError

if TYPE_CHECKING:
    from trainstep._distribution.strategy import Strategy

_current: ContextVar[Any] = ContextVar("layout", default=None)


@contextlib.contextmanager
def within(layout: Any) -> Iterator[None]:
    """Makes `layout` the default layout in a block."""
    token = _current.set(layout)
    try:
        yield
    finally:
        _current.reset(token)


def layout_of(function: str, strategy: Strategy | None) -> Any:
    """Returns the layout of a strategy; without one, the layout of the surrounding scope."""
    if strategy is None:
        return _current.get()
    if not hasattr(strategy, "layout"):
        raise ArgumentError(
            function,
            "strategy",
            "a strategy: `trainstep.Single()`, `Mirrored()` or `Sharded()`",
            repr(strategy),
            "make one with `trainstep.Mirrored()`",
        )
    return strategy.layout
