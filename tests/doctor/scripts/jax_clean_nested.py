"""Compiled functions that call compiled functions, under vmap, grad and scan; sizes differ inside
one program, and a list lives and dies in a trace.
"""

import jax
import jax.numpy as jnp
import numpy as np
import witness


@jax.jit
def inner(x):
    return jnp.tanh(x) * 2


@jax.jit
def outer(x):
    witness.mark("outer")
    parts = [inner(x), inner(x[:2]), inner(x[:1])]
    total = sum(part.sum() for part in parts)
    _, sums = jax.lax.scan(lambda carry, v: (carry + v, inner(carry)), 0.0, x)
    return total + sums.sum() + jax.vmap(inner)(x[:, None]).sum()


gradient = jax.jit(jax.grad(outer))
for _ in range(3):
    outer(np.ones((4,), "float32"))
    gradient(np.ones((4,), "float32"))
witness.say()
