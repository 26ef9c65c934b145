"""nnx: a training loop that nobody compiled."""

import jax.numpy as jnp
import numpy as np
import optax
import witness
from flax import nnx


def loss_of(model, x):
    return jnp.mean(model(x) ** 2)


model, x = nnx.Linear(4, 1, rngs=nnx.Rngs(0)), np.ones((8, 4), "float32")
optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
for _ in range(5):
    gradients = nnx.grad(loss_of)(model, x)  # <- gradient
    optimizer.update(model, gradients)
witness.say()
