"""jax.jit of a new partial at every turn, the same function below it."""

import functools

import jax
import numpy as np
import witness


def scaled(factor, x):
    witness.mark("scaled")
    return factor * x


x = np.ones((3,), "float32")
for turn in range(3):
    jax.jit(functools.partial(scaled, float(turn)))(x)  # <- call
witness.say()
