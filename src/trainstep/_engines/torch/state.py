"""PyTorch: reads and writes the values of parameters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from trainstep._engines.torch.private import gradients

value_of = attrgetter("_value")
# In C, unlike `no_grad`.
set_grad_enabled: Callable[[bool], Any] = getattr(
    gradients, "_set_grad_enabled", torch.set_grad_enabled
)
_consume: Callable[[Iterable[Any]], None] = deque(maxlen=0).extend

# NumPy dtypes that torch, or Keras on torch, does not support, and their replacements.
WIDENED = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}


def write_back(variables: Sequence[Any], values: Iterable[Any]) -> None:
    """Swaps new storage into the parameters of variables; see `swap_in`."""
    swap_in(map(value_of, variables), values)


def swap_in(parameters: Iterable[Any], values: Iterable[Any]) -> None:
    """Swaps new storage into parameters; views of the old storage keep their values.

    It is one call in C. Python handles Ctrl-C between bytecode instructions, so it interrupts
    before or after the whole call.
    """
    _consume(map(setattr, parameters, repeat("data"), values))


def memory(tensor: Any) -> int:
    """Returns an id of a tensor's storage, to detect aliasing."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def leaf_copy(tensor: Any) -> Any:
    """Returns a copy that requires a gradient if the original does."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def from_numpy(x: Any) -> Any:
    """Returns a tensor that aliases a NumPy array, or a copy if it is not writable."""
    usable = x.flags.writeable and x.flags.c_contiguous
    return torch.from_numpy(x if usable else np.array(x, order="C"))


def as_tensor(x: Any) -> Any:
    """Returns a leaf as a plain tensor."""
    return x.detach().contiguous() if isinstance(x, torch.Tensor) else from_numpy(x)
