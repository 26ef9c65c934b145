"""Which layout a trainer or function has: that of its strategy, or of the scope it is made in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from trainstep._common.errors import ArgumentError

if TYPE_CHECKING:
    from trainstep._distribution.strategy import Strategy

_around: ContextVar[Any] = ContextVar("layout", default=None)


@contextlib.contextmanager
def within(layout: Any) -> Iterator[None]:
    """A block in which this is the layout."""
    token = _around.set(layout)
    try:
        yield
    finally:
        _around.reset(token)


def layout_of(function: str, strategy: Strategy | None) -> Any:
    """The layout of a strategy, or, without one, that of the block around."""
    if strategy is None:
        return _around.get()
    if not hasattr(strategy, "layout"):
        raise ArgumentError(
            function,
            "strategy",
            "a strategy: `trainstep.Single()`, `Mirrored()` or `Sharded()`",
            repr(strategy),
            "make one with `trainstep.Mirrored()`",
        )
    return strategy.layout
