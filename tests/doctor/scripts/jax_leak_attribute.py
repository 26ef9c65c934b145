"""A tracer kept in an attribute."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import witness


class Net:
    def __init__(self):
        self.hidden = None

    @functools.partial(jax.jit, static_argnums=0)
    def forward(self, x):
        witness.mark("forward")
        self.hidden = jnp.tanh(x)  # <- leak
        return self.hidden.sum()


net = Net()
for _ in range(3):
    net.forward(np.ones((3,), "float32"))
witness.say(tracer=isinstance(net.hidden, jax.core.Tracer))
