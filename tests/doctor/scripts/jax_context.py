"""The same call under another matmul precision: a program of its own, the arguments equal."""

import jax
import numpy as np
import witness


@jax.jit
def product(a, b):
    witness.mark("product")
    return a @ b


a = np.ones((3, 3), "float32")
product(a, a)
with jax.default_matmul_precision("float32"):
    product(a, a)  # <- precision
product(a, a)
witness.say()
