"""jax.jit of one object's method at every turn: each time a new bound method, soon forgotten."""

import jax
import numpy as np
import witness


class Scaler:
    factor = 2.0

    def apply(self, x):
        witness.mark("apply")
        return x * self.factor


x = np.ones((3,), "float32")
scaler = Scaler()
for _ in range(4):
    jax.jit(scaler.apply)(x)  # <- call
witness.say()
