"""linen: blocks in a module of a train state, which read a global and an entry that change."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import witness
from flax.training.train_state import TrainState

slope = 0.1
config = {"scale": 1.0}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.leaky_relu(nn.Dense(4)(x), slope)  # <- slope


class Net(nn.Module):
    def setup(self):
        self.first = Block()
        self.last = nn.Dense(1)

    def __call__(self, x):
        return self.scaled(self.last(self.first(x)))

    def scaled(self, x):
        return x * config["scale"]  # <- scale


@jax.jit
def step(state, x):
    witness.mark("step")

    def loss_of(params):
        return jnp.mean(state.apply_fn(params, x) ** 2)

    return state.apply_gradients(grads=jax.grad(loss_of)(state.params))


net, x = Net(), np.ones((8, 4), "float32")
params = net.init(jax.random.key(0), x)
state = TrainState.create(apply_fn=net.apply, params=params, tx=optax.sgd(0.1))
for turn in range(3):
    slope, config["scale"] = 0.1 * turn, 1.0 + turn
    state = step(state, x)
witness.say()
