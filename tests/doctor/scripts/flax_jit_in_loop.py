"""nnx.jit of a function that every epoch defines anew."""

import jax.numpy as jnp
import numpy as np
import optax
import witness
from flax import nnx

model, x = nnx.Linear(4, 1, rngs=nnx.Rngs(0)), np.ones((8, 4), "float32")
optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
for _ in range(3):

    @nnx.jit
    def step(model, optimizer, x):
        witness.mark("step")
        gradients = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, gradients)

    for _ in range(2):
        step(model, optimizer, x)  # <- call
witness.say()
