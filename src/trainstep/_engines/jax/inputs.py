"""Turns the arguments of a call into the inputs of a program; the fallback of `input_buffers`.

JAX reads NumPy memory asynchronously, while the caller may already write the next batch into it. So
the program gets a copy of every NumPy array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trainstep._common.codegen import Source
from trainstep._engines.shared.padding import own


class PlainInputs:
    """Each argument is one input of the program.

    Args:
        arguments: The arguments, with shapes and dtypes.

    Attributes:
        inputs: The inputs, with shapes and dtypes.
    """

    def __init__(self, arguments: Sequence[Any]) -> None:
        self.inputs = list(arguments)

    def wrap(self, fun: Callable[..., Any], state: int) -> Callable[..., Any]:
        """Returns `fun`, of `state` arrays and the arguments, as a function of the inputs."""
        return fun

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the inputs for the arguments of a call."""
        return [own(x) if type(x) is np.ndarray else x for x in leaves]

    def source(self, arrays: Mapping[str, Any]) -> tuple[Source, list[str]]:
        """Returns statements that prepare the inputs for such arguments, and their expressions."""
        copied = [f"own({name})" if type(x) is np.ndarray else name for name, x in arrays.items()]
        return Source("", {"own": own}), copied

    def expressions(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        """Returns the expressions of the inputs, given those of unmodified arguments."""
        return list(arguments), {}
