"""Trick: copies NumPy arguments into reused, aligned memory; small ones share an input.

    NumPy arrays --copied--> our memory --used without a copy--> inputs of the program, split there

JAX reads NumPy memory asynchronously, while the caller may write the next batch into it: in place
if it is aligned, and from another thread if it is large. So JAX gets a copy of ours. The copy goes
to aligned memory, which JAX does not copy again, and which is reused once JAX has released it: new
memory costs more than the copy. Each array passed to JAX costs several microseconds, however small;
so small arrays share one block of memory, and become one input.

It does not apply to JAX arrays, which are passed as they are, nor to inputs above 4 MB, which get
new memory.
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
from trainstep._engines.jax.refcounts import BLOCK, refcount
from trainstep._engines.jax.tricks.row_buffers import is_row_buffer
from trainstep._engines.shared.padding import aligned, own

_SMALL = 8192  # elements; to split off a larger array takes longer than to pass it by itself
_WORD = 4  # bytes per element of arrays that share an input
# JAX queues up to 32 calls, each with its inputs. There is a block for each of them, unless that
# takes too many bytes: the step of such a large batch takes so long that new memory costs little.
_MAX_BLOCKS = 34
_MIN_BLOCKS = 4
_MAX_BYTES = 1 << 23  # bytes of all blocks of an input, beyond the fewest blocks
_LARGE = 1 << 22  # bytes; larger inputs reuse no memory


class InputBuffers:
    """Turns the arguments of a call into the inputs of a program.

    Args:
        arguments: The arguments, with shapes and dtypes.
        is_numpy: Which of them are NumPy arrays. (): unknown, so none shares an input.

    Attributes:
        inputs: The inputs, with shapes and dtypes.
    """

    def __init__(self, arguments: Sequence[Any], is_numpy: Sequence[bool]) -> None:
        self._count = len(arguments)
        groups: dict[int, list[int]] = {}
        shared = [p for p, numpy in enumerate(is_numpy) if numpy and _shares(arguments[p])]
        for place in range(len(arguments)):
            groups.setdefault(shared[0] if place in shared else place, []).append(place)
        self._buffers = [
            InputBuffer(places, [arguments[p] for p in places]) for places in groups.values()
        ]
        self.inputs = [buffer.input for buffer in self._buffers]

    def wrap(self, fun: Callable[..., Any], state: int) -> Callable[..., Any]:
        """Returns `fun`, of `state` arrays and the arguments, as a function of the inputs."""

        def of_inputs(*operands: Tensor) -> Any:
            arguments: list[Any] = [None] * self._count
            for buffer, value in zip(self._buffers, operands[state:], strict=True):
                for place, argument in zip(buffer.places, buffer.cut(value), strict=True):
                    arguments[place] = argument
            return fun(*operands[:state], *arguments)

        return of_inputs

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the inputs for the arguments of a call."""
        return [buffer([leaves[place] for place in buffer.places]) for buffer in self._buffers]

    def source(self, arrays: Mapping[str, Any]) -> tuple[Source, list[str]]:
        """Returns statements that prepare the inputs for such arguments, and their expressions."""
        text, names, inputs = "", dict[str, Any](), list[str]()
        for index, buffer in enumerate(self._buffers):
            members = dict(list(arrays.items())[place] for place in buffer.places)
            prepared, given = buffer.source(f"fed{index}", members)
            text += prepared.text
            names.update(prepared.names)
            inputs.append(given)
        return Source(text, names), inputs

    def expressions(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        """Returns the expressions of the inputs, given those of arguments that share no input."""
        assert len(self._buffers) == len(arguments)
        return list(arguments), {}


def _shares(argument: Any) -> bool:
    numbers = np.issubdtype(argument.dtype, np.number)
    small = 0 < math.prod(argument.shape) <= _SMALL
    return small and numbers and argument.dtype.itemsize == _WORD


def _depth(size: int) -> int:
    """Returns how many blocks of memory to keep for an input of `size` bytes."""
    return max(_MIN_BLOCKS, min(_MAX_BLOCKS, _MAX_BYTES // size)) if 0 < size <= _LARGE else 0


class InputBuffer:
    """One input of a program, and the arguments that share it.

    Args:
        places: The places of these arguments in a call.
        arguments: The arguments, with shapes and dtypes.

    Attributes:
        input: The shape and dtype of the input.
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
        # Blocks of memory, with a view for each argument; the least recently used comes first.
        self._blocks: deque[tuple[Any, ...]] = deque()
        self._unshared_count = BLOCK + len(arguments)  # references to a block without other owners

    @property
    def _is_shared(self) -> bool:
        return len(self.places) > 1

    def cut(self, value: Tensor) -> list[Tensor]:
        """Splits the input into the arguments, inside a program."""
        if not self._is_shared:
            return [value]
        parts = zip([0, *self._ends], self._ends, self._arguments, strict=False)
        return [
            lax.bitcast_convert_type(value[start:end], x.dtype).reshape(x.shape)
            for start, end, x in parts
        ]

    def __call__(self, given: Sequence[Any]) -> Any:
        """Returns the input for its arguments."""
        if not self._is_reusable(given):
            return self._copied(*given)
        if not self._blocks:
            self._new_block()
        self._blocks.rotate(-1)
        whole, *parts = self._blocks[-1]
        if refcount(whole) > self._unshared_count:
            whole, *parts = self._new_block()
        for part, x in zip(parts, given, strict=True):
            part[...] = x
        return whole

    def source(self, name: str, arrays: Mapping[str, Any]) -> tuple[Source, str]:
        """Returns statements that prepare the input for such arguments, and its expression."""
        (first, *_), given = arrays, list(arrays.values())
        if not self._is_shared and type(given[0]) is not np.ndarray:
            return Source(""), first
        if not self._is_reusable(given):
            return Source("", {f"{name}_of": self._copied}), f"{name}_of({', '.join(arrays)})"
        if not self._blocks:
            self._new_block()
        parts = [f"{name}_{place}" for place in range(len(arrays))]
        filled = [f"{part}[...] = {array}\n" for part, array in zip(parts, arrays, strict=True)]
        text = _CLAIM.format(
            name=name, parts=", ".join(parts), unshared=self._unshared_count
        ) + "".join(filled)
        if not self._is_shared:
            text = _ROW_BUFFER.format(name=name, array=first, copied=textwrap.indent(text, "    "))
        blocks = self._blocks
        names = {f"{name}_blocks": blocks, f"{name}_rotate": blocks.rotate, "refcount": refcount}
        return Source(
            text, {**names, f"{name}_new_block": self._new_block, "is_row_buffer": is_row_buffer}
        ), name

    def _is_reusable(self, given: Sequence[Any]) -> bool:
        """Whether such arguments are copied to reused memory."""
        return self._depth > 0 and all(type(x) is np.ndarray for x in given)

    def _copied(self, *given: Any) -> Any:
        """Returns the input for arguments that are large, or partly on the device."""
        copies = [own(x) if type(x) is np.ndarray and not is_row_buffer(x) else x for x in given]
        return _joined(self.input.dtype, *copies) if self._is_shared else copies[0]

    def _new_block(self) -> tuple[Any, ...]:
        """Allocates a block of memory, and keeps it if there is room."""
        whole = aligned(self.input.shape, self.input.dtype)
        starts = zip([0, *self._ends], self._ends, self._arguments, strict=False)
        flat = whole.reshape(-1)
        parts = (flat[start:end].view(x.dtype).reshape(x.shape) for start, end, x in starts)
        block = (whole, *parts)
        if len(self._blocks) < self._depth:
            self._blocks.append(block)
        return block


# A signal handler may run the step again between any two calls here. A block that is already bound
# to our name has a second reference, so the handler does not reuse it.
_CLAIM = """{name}_rotate(-1)
{name}, {parts} = {name}_blocks[-1]
if refcount({name}) > {unshared}:
    {name}, {parts} = {name}_new_block()
"""
# A view of a row buffer holds rows that were copied for this batch alone, so it needs no copy. Only
# a view can be one: the cheap test comes first.
_ROW_BUFFER = """if {array}.base is not None and is_row_buffer({array}):
    {name} = {array}
else:
{copied}"""


def _concatenate(dtype: Any, *arrays: Tensor) -> Tensor:
    """Concatenates arguments into one array."""
    flat = [jnp.ravel(lax.bitcast_convert_type(x, dtype)) for x in arrays]
    return jnp.concatenate(flat)


_joined = jax.jit(_concatenate, static_argnums=0)
