"""jax.jit of a lambda inside the loop: a new function each turn, and its program is thrown away."""

import jax
import numpy as np
import witness

x = np.ones((3,), "float32")
for _ in range(4):
    double = jax.jit(lambda v: (witness.mark("<lambda>"), v * 2)[1])
    double(x)  # <- call
    double(x)
witness.say()
