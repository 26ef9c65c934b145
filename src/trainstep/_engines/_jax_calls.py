"""JAX: the ways to call a compiled program.

    operands --entry--> checked one by one, moved if need be, then run
             --straight--> run; what stands against it sends the call to the entry

JAX's entry in C++ looks at every operand, at its type, device and layout, before the program
starts. For a hundred variables that takes as long as a small network. The executable below it takes
arrays as they are, and itself only compares devices and sizes: what does not fit it refuses, before
anything was given away. So the arrays of variables, which Keras has made what they should be, go
straight to it, along with arguments that are ours; what it refuses is left to the entry, which can
say why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any

import jax
from jax._src.lib import xla_client
from jax.sharding import SingleDeviceSharding

Entry = Callable[..., Any]


def entry(compiled: Any) -> Entry:
    """A compiled program's entry in C++, without the Python around it; itself if there is none."""
    try:
        return compiled._executable.create_cpp_call(compiled._params) or compiled  # type: ignore[no-any-return]
    except AttributeError:
        return compiled  # type: ignore[no-any-return]


class Straight:
    """The way past the entry, for programs on one device.

    Args:
        execute: Runs the program on a sequence of its operands; gives the results as they come.
        handlers: What makes an array of each of them.
        inputs: The last of the operands, with shapes and dtypes.
        device: Where the program runs.
    """

    def __init__(
        self, execute: Callable[..., Any], handlers: Any, inputs: Sequence[Any], device: Any
    ) -> None:
        # Names for the text of a call.
        self.names = {
            "execute": execute,
            "arrays_of": methodcaller("consume_with_handlers", handlers),
            "put": xla_client.batched_device_put,
            "device": [device],
            "there": SingleDeviceSharding(device),
            "refused": jax.errors.JaxRuntimeError,
        }
        for place, each in enumerate(inputs):
            self.names[f"aval{place}"] = jax.core.ShapedArray(each.shape, each.dtype)

    def put(self, inputs: Sequence[str]) -> list[str]:
        """The expressions of the last operands on the device, of those of NumPy arrays."""
        return [
            f"put(aval{place}, there, [{name}], device, False)" for place, name in enumerate(inputs)
        ]


def straight(compiled: Any, inputs: Sequence[Any]) -> Straight | None:
    """The way past the entry of a compiled program, if there is one.

    Args:
        compiled: The program.
        inputs: The last of its operands, with shapes and dtypes.
    """
    try:
        below = compiled._executable.unsafe_call
        execute, handlers = below.xla_executable.execute_sharded, below.out_handler.handlers
        (device,) = below.xla_executable.local_devices()
        kept = below.kept_var_idx
    except (AttributeError, ValueError):  # another JAX, or several devices
        return None
    if len(kept) < len(compiled.in_avals[0]) or below.ordered_effects or below.mut is not None:
        return None
    return Straight(execute, handlers, inputs, device)
