"""nnx.jit around nnx.value_and_grad: a function of Flax's, which is about the user's loss."""

import jax.numpy as jnp
import numpy as np
import witness
from flax import nnx


def loss(model, x):
    witness.mark("loss")
    return jnp.mean(model(x) ** 2)


model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
of_loss = nnx.jit(nnx.value_and_grad(loss))
for size in (8, 3, 8):
    of_loss(model, np.ones((size, 4), "float32"))  # <- call
witness.say()
