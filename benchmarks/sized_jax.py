"""Hand-written JAX steps for dynamic sizes: padded to a power of two, and masked."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import settings as s
from benchmarks.native_jax import Array, Arrays, State, mlp, start, updated
from benchmarks.streams import Contender

SMALLEST = 8


def rows(state: State, x: Array, y: Array, size: Array) -> tuple[Array, State]:
    """A step of the MLP; rows from `size` on are padding."""
    return step(state, lambda params: mlp(params, [], x)[0], y, jnp.arange(len(x)) < size)


def lengths(state: State, x: Array, y: Array, size: Array) -> tuple[Array, State]:
    """A step of the convolution; tokens from `size` on are padding."""
    real = (jnp.arange(x.shape[1]) < size)[:, None]

    def predict(params: Arrays) -> Array:
        table, kernel, bias, last, last_bias = params
        vectors = jnp.where(real, table[x], 0)  # as past the end of an array
        order = ("NWC", "WIO", "NWC")
        mixed = jax.lax.conv_general_dilated(vectors, kernel, (1,), "SAME", dimension_numbers=order)
        found = jnp.where(real, jax.nn.relu(mixed + bias), 0)
        return found.sum(1) / size @ last + last_bias

    return step(state, predict, y, jnp.ones(len(x), bool))


def step(state: State, predict: object, y: Array, real: Array) -> tuple[Array, State]:
    """Returns the loss over the true rows, and the new state."""
    count = real.sum()

    def mean(values: Array) -> Array:
        return jnp.where(real[:, None], values, 0).sum() / (count * y.shape[1])

    def loss_of(params: Arrays) -> tuple[Array, Array]:
        error = predict(params) - y
        return mean(error**2), error

    (loss, error), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    return loss, updated(state, grads, [], mean(jnp.abs(error)), count)


def padded(x: np.ndarray, axis: int, size: int) -> np.ndarray:
    """Returns the array with zeros at its end along an axis."""
    shape = list(x.shape)
    shape[axis] = size
    longer = np.zeros(shape, x.dtype)
    longer[tuple(map(slice, x.shape))] = x
    return longer


def build(stream: str, weights: s.Weights) -> Contender:
    """Returns the step of a stream."""
    steps, axis = (rows, 0) if stream == "rows" else (lengths, 1)
    state, traces, real, computed = start(stream, weights), 0, 0, 0

    @partial(jax.jit, donate_argnums=0)
    def train(*args: Array) -> tuple[Array, State]:
        nonlocal traces
        traces += 1
        return steps(*args)

    def run(x: np.ndarray, y: np.ndarray) -> Array:
        nonlocal state, real, computed
        size = x.shape[axis]
        bucket = max(1 << (size - 1).bit_length(), SMALLEST)
        real, computed = real + size, computed + bucket
        x = padded(x, axis, bucket)
        y = padded(y, axis, bucket) if axis == 0 else y
        loss, state = train(state, x, y, np.int32(size))
        return loss

    return Contender(run, lambda: traces, lambda: 1 - real / computed)
