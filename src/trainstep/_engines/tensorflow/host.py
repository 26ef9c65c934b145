"""TensorFlow: host calls, as stateful operations of the graph.

TensorFlow keeps stateful operations, in program order, and the step's assignments wait for them.
XLA does not support them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from trainstep._engines.contract import Tensor
from trainstep._engines.shared.host_function import Host, HostFunction, Results
from trainstep._state.scopes import active


def host_call(fn: HostFunction, tensors: Sequence[Tensor], results: Results) -> list[Tensor]:
    """Calls `fn` now, or at every run of the graph that is being traced."""
    tensors = [tf.stop_gradient(tf.convert_to_tensor(x)) for x in tensors]
    if tf.executing_eagerly():
        outs = fn([np.array(x.numpy()) for x in tensors])
        return [tf.constant(x) for x in outs]
    dtypes = [tf.as_dtype(dtype) for _, dtype in results]
    found = tf.numpy_function(_owned_by_program(Host(fn)), tensors, dtypes)
    outs = [tf.stop_gradient(x) for x in (found if results else ())]
    return [tf.ensure_shape(x, shape) for x, (shape, _) in zip(outs, results, strict=True)]


def _owned_by_program(host: Host) -> Callable[..., Any]:
    """Returns a function that references `host` weakly; the program being traced owns it.

    TensorFlow keeps every function passed to `tf.numpy_function` until the process ends.
    """
    recorder = active()
    if recorder is None:
        return host
    recorder.hosts.append(host)
    ref = weakref.ref(host)

    def call(*arrays: Any) -> list[Any]:
        held = ref()
        assert held is not None
        return held(*arrays)

    return call
