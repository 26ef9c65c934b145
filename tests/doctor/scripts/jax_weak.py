"""A rate that is a Python number in one call and an array of the same dtype in the next."""

import jax
import numpy as np
import witness


@jax.jit
def scaled(x, rate):
    witness.mark("scaled")
    return x * rate


x = np.ones((3,), "float32")
scaled(x, 0.5)
scaled(x, 0.25)
scaled(x, np.float32(0.5))  # <- array
scaled(x, 0.125)
assert scaled._cache_size() == witness.COUNTS["scaled"] == 2
witness.say()
