"""TensorFlow's switchboard: calls a trick, or its fallback.

The engine reaches tricks only through this file, so each can be turned off (`shared/switches.py`)
or deleted alone. A graph, or the arrays of a call, enter; equivalent ones leave, which TensorFlow
or XLA handles faster. A trick may import `tensorflow`, private parts included, and whatever the
engine may import; only this file imports tricks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from trainstep._engines.contract import Executable, Tensor
from trainstep._engines.shared.switches import is_on
from trainstep._engines.tensorflow import private
from trainstep._engines.tensorflow.tricks import flat_call, fused_batch_norm, rewrites

Settle = Callable[[Any], None]


def rewritten(concrete: Any) -> Any:
    """Returns an equivalent recorded function that XLA runs faster on a CPU."""
    return rewrites.rewritten(concrete) if is_on("rewrites") else concrete


def fused_norms(*, by_graph: bool) -> tuple[AbstractContextManager[Any], Settle]:
    """Returns a context that records fused batch normalizations, and a function that ends it."""
    if by_graph and is_on("fused_batch_norm"):
        norms = fused_batch_norm.FusedNorms()
        return norms.recording(), norms.settle
    return nullcontext(), lambda graph: None


def _calls_flat() -> bool:
    return is_on("flat_call", private.context, private.eager_ops)


def tensor_of(array: Any) -> Tensor:
    """Returns a tensor with a copy of a NumPy array."""
    return flat_call.tensor_of(array) if _calls_flat() else tf.constant(array)


def executable(concrete: Any) -> Executable:
    """Returns an executable that runs a concrete function."""
    if _calls_flat():
        return flat_call.executable(concrete)
    return lambda leaves: concrete(*map(tf.convert_to_tensor, leaves))
