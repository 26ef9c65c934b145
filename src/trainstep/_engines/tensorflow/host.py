"""TensorFlow: calls to the host, which are stateful operations of the graph.

TensorFlow keeps such operations, in the order of the program, and the step's assignments wait for
them. XLA has none.
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
    """Calls `fn` at once, or whenever the graph that is being traced runs."""
    tensors = [tf.stop_gradient(tf.convert_to_tensor(x)) for x in tensors]
    if tf.executing_eagerly():
        outs = fn([np.array(x.numpy()) for x in tensors])
        return [tf.constant(x) for x in outs]
    dtypes = [tf.as_dtype(dtype) for _, dtype in results]
    found = tf.numpy_function(_held_by_the_program(Host(fn)), tensors, dtypes)
    outs = [tf.stop_gradient(x) for x in (found if results else ())]
    return [tf.ensure_shape(x, shape) for x, (shape, _) in zip(outs, results, strict=True)]


def _held_by_the_program(host: Host) -> Callable[..., Any]:
    """The function, to be held by the program that is being traced, if it is one of ours.

    TensorFlow holds what it is given for as long as the process lives.
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
