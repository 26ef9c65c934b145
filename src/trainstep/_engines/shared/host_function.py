"""Host functions: how a program calls them, and how their exceptions reach the caller.

    arrays of the program --copied--> NumPy arrays --fn--> NumPy arrays

The engine replaces an exception of the function by an error of its own. So a `Host` keeps the
exception, and `raising_host_errors` raises it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

HostFunction = Callable[[list[Any]], list[Any]]  # from NumPy arrays to NumPy arrays
Results = Sequence[tuple[tuple[int, ...], str]]  # shapes and dtypes


class Host:
    """A function that a program calls with its arrays.

    Attributes:
        fn: The function.
        raised: Its exception in the last run of the program.
    """

    __slots__ = ("__weakref__", "fn", "raised")

    def __init__(self, fn: HostFunction) -> None:
        self.fn = fn
        self.raised: BaseException | None = None

    def __call__(self, *arrays: Any) -> list[Any]:
        try:
            return self.fn(list(map(np.array, arrays)))  # copies: the program owns the memory
        except BaseException as error:
            self.raised = error
            raise RuntimeError(f"{type(error).__name__} on the host: {error}") from None

    def without_padding(self, axes: Sequence[Sequence[int]]) -> Host:
        """Returns a host function that removes padding before it calls this one.

        Args:
            axes: The padded axes of each array. The true sizes follow the arrays, in this order.
        """
        count, fn = len(axes), self.fn

        def unpadded(given: list[Any]) -> list[Any]:
            sizes = iter(given[count:])
            return fn([_cut(x, along, sizes) for x, along in zip(given, axes, strict=False)])

        return Host(unpadded)

    def pop_error(self) -> BaseException | None:
        """Returns the exception, and clears it."""
        error, self.raised = self.raised, None
        return error


def _cut(x: Any, axes: Sequence[int], sizes: Iterator[Any]) -> Any:
    for axis in axes:
        x = x[(*(slice(None),) * axis, slice(int(next(sizes))))]
    return np.array(x)


def raising_host_errors(
    run: Callable[[Sequence[Any]], Any], hosts: Sequence[Host]
) -> Callable[..., Any]:
    """Wraps a program: it raises the exception of a host function, not the engine's error."""

    def wrapped(leaves: Sequence[Any]) -> Any:
        for host in hosts:
            host.raised = None
        try:
            return run(leaves)
        except Exception:
            raised = [error for host in hosts if (error := host.pop_error()) is not None]
            if not raised:
                raise
        # Outside of `except`: the engine's error must not become the context of the user's.
        raise raised[0]

    return wrapped
