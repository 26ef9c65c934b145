"""jax.jit of the same function at every turn, and of a method that is kept compiled elsewhere:
JAX knows both, and traces neither again.
"""

import jax
import numpy as np
import witness


class Scaler:
    factor = 2.0

    def apply(self, x):
        witness.mark("apply")
        return x * self.factor


def double(x):
    witness.mark("double")
    return x + x


x = np.ones((3,), "float32")
scaler = Scaler()
kept = jax.jit(scaler.apply)
kept(x)
for _ in range(4):
    jax.jit(double)(x)
    jax.jit(scaler.apply)(x)
witness.say()
