"""A step that adds a tensor to each of N small variables: ours, and the bare call of the engine.

There is next to nothing to compute, so what is left is the cost of the call itself.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import trainstep as ts

SIZE = 4

# Add `x`, a tensor of the engine, to all the variables; give a scalar to wait for.
Add = Callable[[Any], Any]


def ours(n: int) -> Add:
    """Through this library, over Keras variables."""
    variables = [keras.Variable(np.zeros(SIZE, np.float32)) for _ in range(n)]

    @ts.function(optimize="trace")
    def add(x: Any) -> Any:
        for variable in variables:
            variable.assign(variable + x)
        return keras.ops.sum(x)

    return add


def bare_jax(n: int) -> Add:
    """A jitted function of a donated list of arrays."""
    import jax
    import jax.numpy as jnp

    arrays = [jnp.zeros(SIZE) for _ in range(n)]

    def added(arrays: list[jax.Array], x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        return x.sum(), [array + x for array in arrays]

    compiled = jax.jit(added, donate_argnums=0)

    def add(x: jax.Array) -> jax.Array:
        nonlocal arrays
        result, arrays = compiled(arrays, x)
        return result

    return add


def bare_tensorflow(n: int) -> Add:
    """The concrete function of a `tf.function` over its variables."""
    import tensorflow as tf

    variables = [tf.Variable(tf.zeros(SIZE)) for _ in range(n)]

    def added(x: tf.Tensor) -> tf.Tensor:
        for variable in variables:
            variable.assign(variable + x)
        return tf.reduce_sum(x)

    function: Any = tf.function(added, autograph=False)
    return function.get_concrete_function(tf.TensorSpec(SIZE))


def bare_torch(n: int) -> Add:
    """The replay of the graph of a function of a list of tensors."""
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    tensors = [torch.zeros(SIZE) for _ in range(n)]

    def added(
        tensors: list[torch.Tensor], x: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return x.sum(), [tensor + x for tensor in tensors]

    graph = make_fx(added)(tensors, torch.zeros(SIZE))

    def add(x: torch.Tensor) -> torch.Tensor:
        nonlocal tensors
        with torch.no_grad():
            result, tensors = graph(tensors, x)
        return result

    return add


BARE = {"jax": bare_jax, "tensorflow": bare_tensorflow, "torch": bare_torch}


def bare(n: int) -> Add:
    """The same as ours, in the terms of the engine that Keras runs on."""
    return BARE[keras.backend.backend()](n)
