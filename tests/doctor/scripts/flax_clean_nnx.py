"""nnx as it should be: model, optimizer and metrics are arguments of functions under nnx.jit."""

import jax.numpy as jnp
import numpy as np
import optax
import witness
from flax import nnx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))


def loss_of(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


@nnx.jit
def step(model, optimizer, metrics, x, y):
    witness.mark("step")
    loss, gradients = nnx.value_and_grad(loss_of)(model, x, y)
    metrics.update(values=loss)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def evaluate(model, x, y):
    witness.mark("evaluate")
    return loss_of(model, x, y)


model, rng = Net(nnx.Rngs(0)), np.random.default_rng(0)
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
metrics = nnx.metrics.Average()
tested = nnx.view(model, deterministic=True, use_running_average=True)
for _ in range(5):
    x = rng.normal(size=(8, 4)).astype("float32")
    step(model, optimizer, metrics, x, x[:, :1])
    evaluate(tested, x, x[:, :1])
witness.say(steps=int(optimizer.step[...]))
