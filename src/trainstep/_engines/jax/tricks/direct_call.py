"""JAX: the ways to call a compiled program.

    operands --entry--> checked one by one, moved if need be, then run
             --straight--> run; what stands against it sends the call to the entry

JAX's entry in C++ looks at every operand, at its type, device and layout, before the program
starts. For a hundred variables that takes as long as a small network. The executable below it takes
arrays as they are. So the arrays that a program has made itself go straight to it, and others once
they were looked at, along with arguments that are ours. What the executable refuses, before
anything was given away, is left to the entry, which can say why.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import call, is_, methodcaller
from typing import Any

import jax
from jax._src.lib import xla_client
from jax.sharding import SingleDeviceSharding

Entry = Callable[..., Any]
_MANY = 16  # arrays of variables: fewer pass the entry sooner than they are compared


def entry(compiled: Any) -> Entry:
    """A compiled program's entry in C++, without the Python around it; itself if there is none."""
    try:
        found: Entry | None = compiled._executable.create_cpp_call(compiled._params)
    except AttributeError:
        found = None
    return found or compiled


class Straight:
    """The way past the entry, for programs on one device.

    Args:
        execute: Runs the program on a sequence of its operands; gives the results as they come.
        handlers: What makes an array of each of them.
        state: The first of the operands, those of variables, with shapes and dtypes.
        inputs: The others.
        device: Where the program runs.
    """

    def __init__(
        self,
        execute: Callable[..., Any],
        handlers: Any,
        state: Sequence[Any],
        inputs: Sequence[Any],
        device: Any,
    ) -> None:
        self._there = SingleDeviceSharding(device)
        self._kinds = [(x.shape, x.dtype, _layout(len(x.shape))) for x in state]
        # The arrays that may go straight: this program's own, and those that were looked at.
        self._seen: list[Callable[[], Any]] = [_nothing] * len(state)
        # Names for the text of a call.
        self.names = {
            "execute": execute,
            "arrays_of": methodcaller("consume_with_handlers", handlers),
            "put": xla_client.batched_device_put,
            "device": [device],
            "there": self._there,
            "refused": jax.errors.JaxRuntimeError,
            "seen": self._seen,
            "takes": self.takes,
            "is_same": is_,
            "live": call,
            "ref": weakref.ref,
        }
        for place, each in enumerate(inputs):
            self.names[f"aval{place}"] = jax.core.ShapedArray(each.shape, each.dtype)

    def put(self, inputs: Sequence[str]) -> list[str]:
        """The expressions of the last operands on the device, of those of NumPy arrays."""
        return [
            f"put(aval{place}, there, [{name}], device, False)" for place, name in enumerate(inputs)
        ]

    def takes(self, arrays: Sequence[Any]) -> bool:
        """Whether the program can run on these arrays of its variables; then it knows them."""
        for place, array in enumerate(arrays):
            if self._seen[place]() is not array:
                if not self._fits(array, *self._kinds[place]):
                    return False
                self._seen[place] = weakref.ref(array)
        return True

    def _fits(self, array: Any, shape: tuple[int, ...], dtype: Any, layout: str) -> bool:
        try:
            return (
                array.shape == shape
                and array.dtype == dtype
                and array._sharding == self._there
                and str(array._pjrt_layout) == layout
            )
        except (AttributeError, RuntimeError):  # it is none of JAX's, or was deleted
            return False


def _nothing() -> None:
    """What a weak reference gives whose array is gone."""


def _layout(rank: int) -> str:
    """How the axes of an array lie in memory if nobody asked for anything else."""
    return f"{{{','.join(map(str, reversed(range(rank))))}}}"


def straight(compiled: Any, state: Sequence[Any], inputs: Sequence[Any]) -> Straight | None:
    """The way past the entry of a compiled program, if there is one and it is worth while.

    Args:
        compiled: The program.
        state: The first of its operands, with shapes and dtypes.
        inputs: The others.
    """
    try:
        below = compiled._executable.unsafe_call
        execute, handlers = below.xla_executable.execute_sharded, below.out_handler.handlers
        (device,) = below.xla_executable.local_devices()
        needs_more = (
            below.ordered_effects
            or below.has_unordered_effects
            or below.has_host_callbacks
            or below.mut is not None
            or len(below.kept_var_idx) < len(state) + len(inputs)
        )
    except (AttributeError, ValueError):  # another JAX, or several devices
        return None
    if needs_more or len(state) < _MANY:
        return None
    return Straight(execute, handlers, state, inputs, device)
