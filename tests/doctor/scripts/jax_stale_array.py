"""A NumPy table edited in place: the program holds a copy from its trace."""

import jax
import jax.numpy as jnp
import numpy as np
import witness

table = np.arange(4, dtype="float32")


@jax.jit
def looked_up(index):
    witness.mark("looked_up")
    return jnp.asarray(table)[index]  # <- read


looked_up(3)
table[3] = 100.0
value = float(looked_up(3))
witness.say(value=value)
