"""A step that adds a tensor to each of N small variables: ours, and the bare call of the engine.

The step computes almost nothing, so its time is the call overhead.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import trainstep as ts
from benchmarks import bare

SIZE = 4

# Adds `x`, a tensor of the engine, to all variables; returns a scalar to wait for.
Add = Callable[[Any], Any]


def ours(n: int) -> Add:
    """Returns the step as a `trainstep.function` over Keras variables."""
    variables = [keras.Variable(np.zeros(SIZE, np.float32)) for _ in range(n)]

    @ts.function(optimize="trace")
    def add(x: Any) -> Any:
        for variable in variables:
            variable.assign(variable + x)
        return keras.ops.sum(x)

    return add


def bare_tensorflow(n: int) -> Add:
    """Returns the concrete function of a `tf.function` over its variables."""
    import tensorflow as tf

    variables = [tf.Variable(tf.zeros(SIZE)) for _ in range(n)]

    def added(x: tf.Tensor) -> tf.Tensor:
        for variable in variables:
            variable.assign(variable + x)
        return tf.reduce_sum(x)

    function: Any = tf.function(added, autograph=False)
    return function.get_concrete_function(tf.TensorSpec(SIZE))


def bare_pure(n: int) -> Add:
    """Returns a compiled function of a list of tensors."""

    def added(tensors: list[Any], x: Any) -> tuple[Any, list[Any]]:
        return x.sum(), [tensor + x for tensor in tensors]

    zeros = [keras.ops.zeros(SIZE) for _ in range(n)]
    return bare.keep(added, zeros, keras.ops.zeros(SIZE))


def bare_of_engine(n: int) -> Add:
    """Returns the same step, written for the engine that Keras runs on."""
    return bare_tensorflow(n) if keras.backend.backend() == "tensorflow" else bare_pure(n)
