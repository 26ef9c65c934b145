"""The same with value_and_grad made once, outside the loop."""

import jax
import jax.numpy as jnp
import witness

gradient_of = jax.value_and_grad(lambda w, x: jnp.sum(jnp.tanh(x @ w)))
x, weights = jnp.ones((4, 3)), jnp.ones((3, 1))
for _ in range(4):
    value, gradient = gradient_of(weights, x)  # <- gradient
    weights = weights - 0.1 * gradient
witness.say(value=float(value))
