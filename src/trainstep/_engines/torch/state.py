"""How values enter and leave torch parameters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any

import numpy as np
import torch

value_of = attrgetter("_value")
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled  # in C, unlike `no_grad`
_consume: Callable[[Iterable[Any]], None] = deque(maxlen=0).extend

# Types that NumPy has, and torch or Keras on torch has not.
WIDENED = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}


def write_back(variables: Sequence[Any], values: Iterable[Any]) -> None:
    """Swaps new storage into the parameters of variables; see `swap_in`."""
    swap_in(map(value_of, variables), values)


def swap_in(parameters: Iterable[Any], values: Iterable[Any]) -> None:
    """Swaps new storage into parameters; what views the old storage keeps its numbers.

    One call in C: Ctrl-C, which Python handles between its own instructions, falls before or
    after the whole of it.
    """
    _consume(map(setattr, parameters, repeat("data"), values))


def memory(tensor: Any) -> int:
    """What tells whether two tensors share memory."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def leaf_copy(tensor: Any) -> Any:
    """A copy that can be differentiated by if the original can."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def from_numpy(x: Any) -> Any:
    """A tensor over a NumPy array's memory, or over a copy where torch could not write to it."""
    usable = x.flags.writeable and x.flags.c_contiguous
    return torch.from_numpy(x if usable else np.array(x, order="C"))


def as_tensor(x: Any) -> Any:
    """A leaf as a plain tensor."""
    return x.detach().contiguous() if isinstance(x, torch.Tensor) else from_numpy(x)
