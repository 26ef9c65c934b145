"""linen: `apply` itself is compiled, plain and with an argument filled in, for batches of two sizes."""

import functools

import flax.linen as nn
import jax
import numpy as np
import witness

factor = 1.0


class Net(nn.Module):
    @nn.compact  # <- def apply
    def __call__(self, x, training=False):
        witness.mark("apply")
        return nn.Dense(1)(x) * factor  # <- read


net, x = Net(), np.ones((8, 4), "float32")
params = net.init(jax.random.key(0), x)
witness.COUNTS.clear()
apply = jax.jit(net.apply)
for start in (0, 4, 0):
    apply(params, x[start:])  # <- call
training = jax.jit(functools.partial(net.apply, training=True))
training(params, x)
factor = 2.0
training(params, x)
witness.say()
