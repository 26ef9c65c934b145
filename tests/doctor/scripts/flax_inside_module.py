"""linen: the body of a module draws from NumPy, counts in a global and reads one that changes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import witness

temperature = 1.0
calls = 0


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        global calls
        calls += 1  # <- count
        x = nn.Dense(1)(x) + np.random.normal()  # <- draw
        return x / temperature  # <- read


@jax.jit
def step(params, x):
    witness.mark("step")
    gradients = jax.grad(lambda p: jnp.mean(net.apply(p, x) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


net, x = Net(), np.ones((8, 4), "float32")
params = net.init(jax.random.key(0), x)
before = calls
for turn in range(4):
    temperature = 1.0 + turn
    params = step(params, x)
witness.say(calls=calls - before)
