"""linen: the last batch of each epoch is shorter, and has a program of its own."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import witness
from flax.training.train_state import TrainState

net = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(1)])


@jax.jit
def step(state, x, y):
    witness.mark("step")
    gradients = jax.grad(lambda p: jnp.mean((state.apply_fn(p, x) - y) ** 2))(state.params)
    return state.apply_gradients(grads=gradients)


rng = np.random.default_rng(0)
x, y = rng.normal(size=(20, 4)).astype("float32"), np.ones((20, 1), "float32")
params = net.init(jax.random.key(0), x[:1])
state = TrainState.create(apply_fn=net.apply, params=params, tx=optax.sgd(0.1))
for _ in range(2):
    for start in range(0, 20, 8):
        state = step(state, x[start : start + 8], y[start : start + 8])  # <- call
witness.say()
