"""A training loop without jit: jax.grad runs each operation by itself, at every step."""

import jax
import jax.numpy as jnp
import witness


def loss_of(weights, x):
    return jnp.mean((x @ weights) ** 2)


x, weights = jnp.ones((4, 3)), jnp.ones((3, 1))
for _ in range(5):
    gradient = jax.grad(loss_of)(weights, x)  # <- gradient
    weights = weights - 0.1 * gradient
witness.say(loss=float(loss_of(weights, x)))
