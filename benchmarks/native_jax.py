"""Hand-written JAX steps: parameters in a pytree, one jitted function, its state donated."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import settings as s

Array = jax.Array
Arrays = list[Array]
Output = tuple[Array, Arrays]  # the prediction, and the new extras


class State(NamedTuple):
    """The state of a step."""

    params: Arrays
    extras: Arrays  # changed by the forward pass: moving statistics, the dropout key
    first: Arrays  # Adam's moments
    second: Arrays
    steps: Array
    error_sum: Array  # the metric
    error_count: Array


def mlp(params: Arrays, extras: Arrays, x: Array) -> Output:
    """Dense layers with ReLU on all but the last."""
    *hidden, (kernel, bias) = zip(params[::2], params[1::2], strict=True)
    for hidden_kernel, hidden_bias in hidden:
        x = jax.nn.relu(x @ hidden_kernel + hidden_bias)
    return x @ kernel + bias, extras


def convolve(x: Array, kernel: Array) -> Array:
    """A convolution that keeps the size of the image."""
    order = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=order)


def batch_norm(x: Array, gamma: Array, beta: Array, stats: Arrays) -> Output:
    """Normalizes over the batch, and updates the moving mean and variance."""
    mean, variance = jnp.mean(x, (0, 1, 2)), jnp.var(x, (0, 1, 2))
    scale = gamma * jax.lax.rsqrt(variance + s.NORM_EPSILON)
    rate = 1 - s.NORM_MOMENTUM
    moved = [old + rate * (new - old) for old, new in zip(stats, (mean, variance), strict=True)]
    return x * scale + (beta - mean * scale), moved


def convnet(params: Arrays, extras: Arrays, x: Array) -> Output:
    """Two convolutions with batch normalization, pooling, dropout, a dense layer."""
    conv_1, gamma_1, beta_1, conv_2, gamma_2, beta_2, kernel, bias = params
    *stats, key = extras
    x, stats_1 = batch_norm(convolve(x, conv_1), gamma_1, beta_1, stats[:2])
    n, height, width, channels = x.shape
    x = jax.nn.relu(x).reshape(n, height // 2, 2, width // 2, 2, channels).max((2, 4))
    x, stats_2 = batch_norm(convolve(x, conv_2), gamma_2, beta_2, stats[2:])
    x = jax.nn.relu(x).mean((1, 2))
    key, dropout_key = jax.random.split(key)
    kept = jax.random.bernoulli(dropout_key, 1 - s.DROPOUT, x.shape)
    x = jnp.where(kept, x / (1 - s.DROPOUT), 0)
    return x @ kernel + bias, [*stats_1, *stats_2, key]


def layer_norm(x: Array, gamma: Array, beta: Array) -> Array:
    """Normalizes over the last axis."""
    mean, variance = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + s.NORM_EPSILON) * gamma + beta


def transformer(params: Arrays, extras: Arrays, x: Array) -> Output:
    """One pre-norm attention block, then a mean over the sequence and a dense layer."""
    g_1, b_1, *qkv, out, out_bias, g_2, b_2, w_1, c_1, w_2, c_2, w_3, c_3 = params
    normed = layer_norm(x, g_1, b_1)
    pairs = zip(qkv[::2], qkv[1::2], strict=True)
    query, keys, values = (jnp.einsum("ntd,dhk->nthk", normed, w) + b for w, b in pairs)
    scores = jnp.einsum("nthk,nshk->nhts", query / s.KEY_SIZE**0.5, keys)
    mixed = jnp.einsum("nhts,nshk->nthk", jax.nn.softmax(scores), values)
    x = x + jnp.einsum("nthk,hkd->ntd", mixed, out) + out_bias
    x = x + jax.nn.relu(layer_norm(x, g_2, b_2) @ w_1 + c_1) @ w_2 + c_2
    return x.mean(1) @ w_3 + c_3, extras


NETWORKS = {"convnet": convnet, "transformer": transformer}


def one_step(network: str, state: State, x: Array, y: Array) -> tuple[Array, State]:
    """Returns the loss of a batch, and the new state."""

    def loss_of(params: Arrays) -> tuple[Array, Output]:
        prediction, extras = NETWORKS.get(network, mlp)(params, state.extras, x)
        return jnp.mean((prediction - y) ** 2), (prediction, extras)

    (loss, (prediction, extras)), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    return loss, updated(state, grads, extras, jnp.mean(jnp.abs(prediction - y)), len(x))


def updated(state: State, grads: Arrays, extras: Arrays, error: Array, rows: int | Array) -> State:
    """Returns the state after a step of Adam and an update of the metric by so many rows."""

    def moments(old: Arrays, new: Arrays, beta: float) -> Arrays:
        return [m + (g - m) * (1 - beta) for m, g in zip(old, new, strict=True)]

    count = state.steps + 1
    rate = s.LEARNING_RATE * jnp.sqrt(1 - s.BETA_2**count) / (1 - s.BETA_1**count)
    first = moments(state.first, grads, s.BETA_1)
    second = moments(state.second, [g * g for g in grads], s.BETA_2)
    steps = zip(state.params, first, second, strict=True)
    params = [p - rate * m / (jnp.sqrt(v) + s.EPSILON) for p, m, v in steps]
    error_sum = state.error_sum + error * rows
    error_count = state.error_count + rows
    return State(params, extras, first, second, count, error_sum, error_count)


def many_steps(network: str, state: State, x: Array, y: Array) -> tuple[Array, State]:
    """Returns the loss of the last of several stacked batches, and the new state."""

    def one(state: State, batch: tuple[Array, Array]) -> tuple[State, Array]:
        loss, state = one_step(network, state, *batch)
        return state, loss

    state, losses = jax.lax.scan(one, state, (x, y))
    return losses[-1], state


def start(network: str, weights: s.Weights) -> State:
    """Returns the initial state of a network, with the weights of its Keras model."""
    # In the convnet, the weights of each normalization end with its two statistics.
    moving = (3, 4, 8, 9) if network == "convnet" else ()
    params = [jnp.array(w) for i, w in enumerate(weights) if i not in moving]
    extras = [jnp.array(weights[i]) for i in moving]
    if network == "convnet":
        extras.append(jax.random.PRNGKey(0))
    first, second = ([jnp.zeros_like(p) for p in params] for _ in range(2))
    # Arrays with an explicit dtype: weakly typed ones would retrace the second step.
    counts = jnp.zeros((), jnp.int32), jnp.zeros(()), jnp.zeros(())
    return State(params, extras, first, second, *counts)


def build(
    network: str,
    weights: s.Weights,
    many: bool = False,
    options: dict[str, str] | None = None,
) -> s.Step:
    """Returns the step of a network; with `many`, it runs once per stacked batch."""
    state = start(network, weights)
    steps = many_steps if many else one_step
    train = jax.jit(partial(steps, network), donate_argnums=0, compiler_options=options)

    def step(x: np.ndarray, y: np.ndarray) -> Array:
        nonlocal state
        loss, state = train(state, x, y)
        return loss

    return step


def variants(network: str, weights: s.Weights) -> dict[str, s.Step]:
    """Returns the hand-written steps to measure, by name."""
    own_kernels = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}
    return {
        "jit": build(network, weights),
        "jit, XLA's own kernels": build(network, weights, options=own_kernels),
    }
