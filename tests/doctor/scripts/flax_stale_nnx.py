"""nnx: a global that the body of a module reads is changed between calls."""

import numpy as np
import witness
from flax import nnx

temperature = 1.0


class Net(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 1, rngs=rngs, kernel_init=nnx.initializers.ones)

    def __call__(self, x):
        return self.dense(x) / temperature  # <- read


@nnx.jit
def forward(model, x):
    witness.mark("forward")
    return model(x)


model, x = Net(nnx.Rngs(0)), np.ones((1, 4), "float32")
forward(model, x)
temperature = 4.0
witness.say(value=float(forward(model, x)[0, 0]))
