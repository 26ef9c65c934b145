"""The methods of two objects, each compiled: one is called with two sizes, the other with one."""

import jax
import numpy as np
import witness


class Scaler:
    def __init__(self, factor):
        self.factor = factor

    def apply(self, x):
        witness.mark("apply")
        return x * self.factor


one, other = Scaler(1.0), Scaler(2.0)
first, second = jax.jit(one.apply), jax.jit(other.apply)
first(np.ones((2,), "float32"))
second(np.ones((2,), "float32"))
for size in (2, 3, 2):
    second(np.ones((size,), "float32"))  # <- call
witness.say()
