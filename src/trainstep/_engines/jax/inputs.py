"""The arguments of a call on their way to a program, the plain way.

JAX reads NumPy memory later, while the caller may already fill the next batch into it. So the
program gets a copy of every NumPy array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trainstep._common.codegen import Source
from trainstep._engines.shared.padding import own


class PlainInputs:
    """Every argument is one input of the program.

    Args:
        arguments: The arguments, with shapes and dtypes.

    Attributes:
        inputs: The inputs, with shapes and dtypes.
    """

    def __init__(self, arguments: Sequence[Any]) -> None:
        self.inputs = list(arguments)

    def around(self, fun: Callable[..., Any], state: int) -> Callable[..., Any]:
        """A function of `state` arrays and the inputs, made of one of them and the arguments."""
        return fun

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """The inputs, of the arguments of a call."""
        return [own(x) if type(x) is np.ndarray else x for x in leaves]

    def source(self, arrays: Mapping[str, Any]) -> tuple[Source, list[str]]:
        """Statements that prepare the inputs, for arguments like these; and their expressions."""
        copied = [f"own({name})" if type(x) is np.ndarray else name for name, x in arrays.items()]
        return Source("", {"own": own}), copied

    def taken(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        """The expressions of the inputs, of those of arguments that nobody else writes to."""
        return list(arguments), {}
