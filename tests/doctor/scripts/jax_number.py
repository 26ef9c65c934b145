"""A Python integer, then a Python float: the value alone costs nothing, its type a trace."""

import jax
import numpy as np
import witness


@jax.jit
def scaled(x, rate):
    witness.mark("scaled")
    return x * rate


x = np.ones((3,), "float32")
for rate in (1, 2, 0.5, 3, 0.25):
    scaled(x, rate)  # <- call
assert scaled._cache_size() == witness.COUNTS["scaled"] == 2
witness.say()
