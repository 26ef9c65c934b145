"""A static argument: a program for each of its values."""

import functools

import jax
import numpy as np
import witness


@functools.partial(jax.jit, static_argnames=("power",))
def raised(x, power):
    witness.mark("raised")
    return x**power


for power in (1, 2, 3, 2):
    raised(np.ones((3,), "float32"), power=power)  # <- call
assert raised._cache_size() == witness.COUNTS["raised"] == 3
witness.say()
