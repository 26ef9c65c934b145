"""nnx: a parameter is put into the model after its first step, and then replaced by a larger one."""

import numpy as np
import witness
from flax import nnx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        x = self.dense(x)
        return x + self.shift if hasattr(self, "shift") else x


@nnx.jit
def forward(model, x):
    witness.mark("forward")
    return model(x)


model, x = Net(nnx.Rngs(0)), np.ones((8, 4), "float32")
forward(model, x)
model.shift = nnx.Param(np.zeros((4,)))
forward(model, x)  # <- more
model.shift = nnx.Param(np.zeros((8, 4)))
forward(model, x)  # <- larger
witness.say()
