"""jax.jit of a method, of an object that every turn makes anew."""

import jax
import numpy as np
import witness


class Scaler:
    def __init__(self, factor):
        self.factor = factor

    def apply(self, x):
        witness.mark("apply")
        return x * self.factor


x = np.ones((3,), "float32")
for turn in range(4):
    scaler = Scaler(float(turn))
    apply = jax.jit(scaler.apply)
    apply(x)  # <- call
    apply(x)
witness.say()
