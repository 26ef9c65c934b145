"""A function on the host, as a program calls it, and what becomes of what it raises.

    arrays of the program --copied--> NumPy arrays --fn--> NumPy arrays

Between the function and the caller of a program stands the engine, which makes an error of its own
of whatever the function raises. A `Host` keeps what was raised, and `surfacing` raises that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

HostFunction = Callable[[list[Any]], list[Any]]  # of NumPy arrays, to NumPy arrays
Results = Sequence[tuple[tuple[int, ...], str]]  # the shapes and dtypes of those


class Host:
    """A function that a program calls with its arrays.

    Attributes:
        fn: The function.
        raised: What it raised when the program ran last.
    """

    __slots__ = ("__weakref__", "fn", "raised")

    def __init__(self, fn: HostFunction) -> None:
        self.fn = fn
        self.raised: BaseException | None = None

    def __call__(self, *arrays: Any) -> list[Any]:
        try:
            return self.fn(list(map(np.array, arrays)))  # copies: the memory is the program's
        except BaseException as error:
            self.raised = error
            raise RuntimeError(f"{type(error).__name__} on the host: {error}") from None

    def cutting(self, axes: Sequence[Sequence[int]]) -> Host:
        """The same for arrays that are padded along some axes.

        Args:
            axes: Those of each array. Their true sizes come after the arrays, in this order.
        """
        count, fn = len(axes), self.fn

        def cut(given: list[Any]) -> list[Any]:
            sizes = iter(given[count:])
            return fn([_cut(x, along, sizes) for x, along in zip(given, axes, strict=False)])

        return Host(cut)

    def taken(self) -> BaseException | None:
        """What it raised, which is then forgotten."""
        error, self.raised = self.raised, None
        return error


def _cut(x: Any, axes: Sequence[int], sizes: Iterator[Any]) -> Any:
    for axis in axes:
        x = x[(*(slice(None),) * axis, slice(int(next(sizes))))]
    return np.array(x)


def surfacing(run: Callable[[Sequence[Any]], Any], hosts: Sequence[Host]) -> Callable[..., Any]:
    """The same program, raising what a function on the host raised and not what became of it."""

    def careful(leaves: Sequence[Any]) -> Any:
        for host in hosts:
            host.raised = None
        try:
            return run(leaves)
        except Exception:
            raised = [error for host in hosts if (error := host.taken()) is not None]
            if not raised:
                raise
        # Out here, so that the engine's error does not become the context of the user's own.
        raise raised[0]

    return careful
