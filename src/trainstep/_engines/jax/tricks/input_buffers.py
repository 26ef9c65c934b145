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

import functools
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

from trainstep._common.codegen import Source, define
from trainstep._engines.contract import Tensor
from trainstep._engines.jax.refcounts import expected_count, refcount
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
        self._fill: Callable[..., Any] | None = None

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
        if self._fill is None:
            arrays = [f"x{place}" for place in range(len(given))]
            source = self._claim("block", arrays)
            self._fill = define(
                f"fill({', '.join(arrays)})", f"{source.text}return block", source.names
            )
        return self._fill(*given)

    def source(self, name: str, arrays: Mapping[str, Any]) -> tuple[Source, str]:
        """Returns statements that prepare the input for such arguments, and its expression."""
        (first, *_), given = arrays, list(arrays.values())
        if not self._is_shared and type(given[0]) is not np.ndarray:
            return Source(""), first
        if not self._is_reusable(given):
            return Source("", {f"{name}_of": self._copied}), f"{name}_of({', '.join(arrays)})"
        if not self._blocks:
            self._new_block()
        claim = self._claim(name, list(arrays))
        if self._is_shared:
            return claim, name
        copied = textwrap.indent(claim.text, "    ")
        text = _ROW_BUFFER.format(name=name, array=first, copied=copied)
        return Source(text, {**claim.names, "is_row_buffer": is_row_buffer}), name

    def _claim(self, name: str, arrays: Sequence[str]) -> Source:
        """Returns statements that copy arrays into a block without another owner."""
        parts = [f"{name}_{place}" for place in range(len(arrays))]
        text = _CLAIM.format(name=name, parts=", ".join(parts))
        text += "".join(f"{p}[...] = {array}\n" for p, array in zip(parts, arrays, strict=True))
        return Source(
            text,
            {
                f"{name}_blocks": self._blocks,
                f"{name}_rotate": self._blocks.rotate,
                f"{name}_new_block": self._new_block,
                f"{name}_unshared": (_own_references() or 0) + len(arrays),
                "refcount": refcount,
            },
        )

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
# to our name has a second reference, so the handler does not reuse it. `map` counts: how often code
# that loads a name refers to its value depends on the code around it, from Python 3.14 on.
_CLAIM = """{name}_rotate(-1)
{name}_block = {name}_blocks[-1]
{name}, {parts} = {name}_block
if next(map(refcount, {name}_block)) > {name}_unshared:
    {name}, {parts} = {name}_new_block()
"""


@functools.cache
def _own_references() -> int | None:
    """Returns how often `_CLAIM` itself refers to a block, apart from the block's parts."""
    parts = [jax.ShapeDtypeStruct((1,), np.float32)] * 2
    buffer = InputBuffer((0, 1), parts)
    text = _CLAIM.format(name="block", parts="block_0, block_1") + "return block"
    names = {"block_blocks": buffer._blocks, "block_rotate": buffer._blocks.rotate}
    names |= {"block_new_block": buffer._new_block, "refcount": refcount}
    claim = define("claim()", text, names)

    def trial(alone: Any, is_shared: bool) -> bool:
        buffer._blocks.clear()
        kept, *_ = buffer._new_block()
        number, view = id(kept), kept[:1] if is_shared else None
        del kept
        claim.__globals__["block_unshared"] = alone
        is_other = id(claim()) != number
        del view
        return is_other

    # By the block, its name, the argument of `refcount` and the parts.
    found = expected_count("a NumPy argument of a step", trial, most=3 + len(parts))
    return None if found is None else found - len(parts)


def works() -> bool:
    """Whether this Python tells when a block of memory has another owner."""
    return _own_references() is not None


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
