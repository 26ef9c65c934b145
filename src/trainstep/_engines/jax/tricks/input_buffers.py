"""JAX: the arguments of a call on their way to a program.

    NumPy arrays --copied--> memory of ours --taken as it is--> inputs of the program, cut there

JAX reads NumPy memory later, while the caller may be filling the next batch into it: in place if
it is aligned; if it is large, even the copy is made on another thread. So it gets a copy of ours,
in memory that is aligned, and used again once JAX has let go of it. Each array that JAX is handed
costs several microseconds, however small; so small ones share a piece of memory, and are one input.
"""

from __future__ import annotations

import math
import textwrap
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trainstep._common.codegen import Source
from trainstep._engines.contract import Tensor
from trainstep._engines.jax.refcounts import PIECE, refcount
from trainstep._engines.jax.tricks.row_buffers import is_lent
from trainstep._engines.shared.padding import aligned, own

_SMALL = 8192  # numbers: to cut a larger array out of others takes longer than to hand it over
_WORD = 4  # bytes of a number of those that share an input
# JAX lets 32 calls wait, each with its inputs, and new memory costs more than the copy to it.
# So there are pieces for all of them, unless that takes too many bytes: where a batch is so large,
# its step takes long, and new memory little of it.
_PIECES = 34
_FEW = 4
_KEPT = 1 << 23  # bytes of an input's pieces, if they are more than a few
_LARGE = 1 << 22  # bytes: of larger inputs, none are kept


class InputBuffers:
    """How the arguments of a call become the inputs of a program.

    Args:
        arguments: The arguments, with shapes and dtypes.
        of_numpy: Which of them come from NumPy. (): not known, and none shares an input.

    Attributes:
        inputs: The inputs, with shapes and dtypes.
    """

    def __init__(self, arguments: Sequence[Any], of_numpy: Sequence[bool]) -> None:
        self._count = len(arguments)
        groups: dict[int, list[int]] = {}
        shared = [p for p, is_numpy in enumerate(of_numpy) if is_numpy and _shares(arguments[p])]
        for place in range(len(arguments)):
            groups.setdefault(shared[0] if place in shared else place, []).append(place)
        self._feeds = [Feed(places, [arguments[p] for p in places]) for places in groups.values()]
        self.inputs = [feed.input for feed in self._feeds]

    def around(self, fun: Callable[..., Any], state: int) -> Callable[..., Any]:
        """A function of so much state and the inputs, of one of the state and the arguments."""

        def fed(*operands: Tensor) -> Any:
            arguments: list[Any] = [None] * self._count
            for feed, value in zip(self._feeds, operands[state:], strict=True):
                for place, argument in zip(feed.places, feed.cut(value), strict=True):
                    arguments[place] = argument
            return fun(*operands[:state], *arguments)

        return fed

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """The inputs, of the arguments of a call."""
        return [feed([leaves[place] for place in feed.places]) for feed in self._feeds]

    def source(self, arrays: Mapping[str, Any]) -> tuple[Source, list[str]]:
        """Statements that prepare the inputs, of arguments like these; and their expressions."""
        text, names, inputs = "", dict[str, Any](), list[str]()
        for index, feed in enumerate(self._feeds):
            members = dict(list(arrays.items())[place] for place in feed.places)
            prepared, given = feed.source(f"fed{index}", members)
            text += prepared.text
            names.update(prepared.names)
            inputs.append(given)
        return Source(text, names), inputs

    def taken(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        """The expressions of the inputs, of those of arguments that share none."""
        assert len(self._feeds) == len(arguments)
        return list(arguments), {}


def _shares(argument: Any) -> bool:
    numbers = np.issubdtype(argument.dtype, np.number)
    small = 0 < math.prod(argument.shape) <= _SMALL
    return small and numbers and argument.dtype.itemsize == _WORD


def _depth(size: int) -> int:
    """How many pieces of memory to keep for an input of so many bytes."""
    return max(_FEW, min(_PIECES, _KEPT // size)) if 0 < size <= _LARGE else 0


class Feed:
    """One input of a program, and the arguments that it is made of.

    Args:
        places: Which arguments those are.
        arguments: Those, with shapes and dtypes.

    Attributes:
        input: Its shape and dtype.
    """

    def __init__(self, places: Sequence[int], arguments: Sequence[Any]) -> None:
        self.places, self._arguments = places, arguments
        self._ends = list(accumulate(math.prod(x.shape) for x in arguments))
        dtypes = {x.dtype for x in arguments}
        dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.int32)
        shape = (self._ends[-1],) if self._is_shared else arguments[0].shape
        self.input = jax.ShapeDtypeStruct(shape, dtype)
        size = self._ends[-1] * dtype.itemsize
        self._depth = _depth(size)
        # Memory, and the parts of it that the arguments go to; the first was used longest ago.
        self._pieces: deque[tuple[Any, ...]] = deque()
        self._alone = PIECE + len(arguments)  # references to memory that only its piece holds

    @property
    def _is_shared(self) -> bool:
        return len(self.places) > 1

    def cut(self, value: Tensor) -> list[Tensor]:
        """The arguments, inside a program."""
        if not self._is_shared:
            return [value]
        parts = zip([0, *self._ends], self._ends, self._arguments, strict=False)
        return [
            lax.bitcast_convert_type(value[start:end], x.dtype).reshape(x.shape)
            for start, end, x in parts
        ]

    def __call__(self, given: Sequence[Any]) -> Any:
        """The input, of its arguments."""
        if not self._lands(given):
            return self._otherwise(*given)
        if not self._pieces:
            self._more()
        self._pieces.rotate(-1)
        whole, *parts = self._pieces[-1]
        if refcount(whole) > self._alone:
            whole, *parts = self._more()
        for part, x in zip(parts, given, strict=True):
            part[...] = x
        return whole

    def source(self, name: str, arrays: Mapping[str, Any]) -> tuple[Source, str]:
        """Statements that prepare the input, and its expression, for arguments like these."""
        (first, *_), given = arrays, list(arrays.values())
        if not self._is_shared and type(given[0]) is not np.ndarray:
            return Source(""), first
        if not self._lands(given):
            return Source("", {f"{name}_of": self._otherwise}), f"{name}_of({', '.join(arrays)})"
        if not self._pieces:
            self._more()
        parts = [f"{name}_{place}" for place in range(len(arrays))]
        filled = [f"{part}[...] = {array}\n" for part, array in zip(parts, arrays, strict=True)]
        text = _FREE.format(name=name, parts=", ".join(parts), alone=self._alone) + "".join(filled)
        if not self._is_shared:
            text = _LENT.format(name=name, array=first, copied=textwrap.indent(text, "    "))
        pieces = self._pieces
        names = {f"{name}_pieces": pieces, f"{name}_turn": pieces.rotate, "refcount": refcount}
        return Source(text, {**names, f"{name}_more": self._more, "is_lent": is_lent}), name

    def _lands(self, given: Sequence[Any]) -> bool:
        """Whether such arguments go to memory that is used again."""
        return self._depth > 0 and all(type(x) is np.ndarray for x in given)

    def _otherwise(self, *given: Any) -> Any:
        """The input, of arguments that are large, or some of which are on the device."""
        copies = [own(x) if type(x) is np.ndarray and not is_lent(x) else x for x in given]
        return _joined(self.input.dtype, *copies) if self._is_shared else copies[0]

    def _more(self) -> tuple[Any, ...]:
        """A new piece of memory."""
        whole = aligned(self.input.shape, self.input.dtype)
        starts = zip([0, *self._ends], self._ends, self._arguments, strict=False)
        flat = whole.reshape(-1)
        parts = (flat[start:end].view(x.dtype).reshape(x.shape) for start, end, x in starts)
        piece = (whole, *parts)
        if len(self._pieces) < self._depth:
            self._pieces.append(piece)
        return piece


# A signal's handler may run the step anew in the middle of this: between any two calls. What it
# finds in a name of ours is held, and so not free.
_FREE = """{name}_turn(-1)
{name}, {parts} = {name}_pieces[-1]
if refcount({name}) > {alone}:
    {name}, {parts} = {name}_more()
"""
# What was fetched for this batch alone is no other's: a view of fetched rows. An array that is
# no view needs no closer look.
_LENT = """if {array}.base is not None and is_lent({array}):
    {name} = {array}
else:
{copied}"""


def _together(dtype: Any, *arrays: Tensor) -> Tensor:
    """Arguments in one array."""
    flat = [jnp.ravel(lax.bitcast_convert_type(x, dtype)) for x in arrays]
    return jnp.concatenate(flat)


_joined = jax.jit(_together, static_argnums=0)
