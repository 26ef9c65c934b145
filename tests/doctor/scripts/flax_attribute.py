"""nnx: plain attributes are part of the structure, so a changed one is a new program."""

import jax.numpy as jnp
import numpy as np
import optax
import witness
from flax import nnx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 1, rngs=rngs)
        self.scale = 1.0

    def __call__(self, x):
        return self.dense(x) * self.scale


@nnx.jit
def step(model, optimizer, x):
    witness.mark("step")
    gradients = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model)
    optimizer.update(model, gradients)


model, x = Net(nnx.Rngs(0)), np.ones((8, 4), "float32")
optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
for epoch in range(3):
    model.scale = 1.0 + epoch
    for _ in range(2):
        step(model, optimizer, x)  # <- call
witness.say()
