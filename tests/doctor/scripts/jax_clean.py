"""A training loop as it should be: state and keys passed through, Adam by hand, a schedule inside."""

import functools
import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import witness


def forward(params, x, key, training):
    for kernel, bias in params:
        x = jnp.tanh(x @ kernel + bias)
    if training:
        x = x * jax.random.bernoulli(key, 0.9, x.shape)
    return x


@functools.partial(jax.jit, static_argnames="training", donate_argnums=0)
def step(state, x, y, *, training=True):
    witness.mark("step")

    def loss_of(params):
        parts = []
        parts.append(jnp.mean((forward(params, x, key, training) - y) ** 2))
        parts.append(1e-3 * sum(jnp.sum(k**2) for k, _ in params))
        return sum(parts)

    key, following = jax.random.split(state["key"])
    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    rate = 0.1 * 0.9 ** state["count"].astype("float32")
    moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["moments"], gradients)
    params = jax.tree.map(lambda p, m: p - rate * m, state["params"], moments)
    jax.debug.callback(lambda value: seen.append(float(value)), loss)
    return {
        "params": params,
        "moments": moments,
        "key": following,
        "count": state["count"] + 1,
    }, loss


seen = []
rng = np.random.default_rng(0)
params = [(jnp.asarray(rng.normal(size=(4, 4)), "float32"), jnp.zeros((4,))) for _ in range(2)]
state = {
    "params": params,
    "moments": jax.tree.map(jnp.zeros_like, params),
    "key": jax.random.key(0),
    "count": jnp.zeros((), "int32"),
}
for _ in range(5):
    started, jitter = time.time(), random.random()
    x = (rng.normal(size=(8, 4)) + jitter).astype("float32")
    state, loss = step(state, x, x)
    assert time.time() >= started
jax.effects_barrier()
witness.say(steps=int(state["count"]), seen=len(seen))
