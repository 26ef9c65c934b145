"""An attribute of the object whose method was compiled changes between calls."""

import jax
import jax.numpy as jnp
import numpy as np
import witness


class Loss:
    def __init__(self):
        self.margin = 0.5
        self.compiled = jax.jit(self.of)

    def of(self, x):
        witness.mark("of")
        return jnp.maximum(0.0, self.margin - x).sum()  # <- read


loss = Loss()
loss.compiled(np.zeros((2,), "float32"))
loss.margin = 2.0
value = float(loss.compiled(np.zeros((2,), "float32")))
witness.say(value=value)
