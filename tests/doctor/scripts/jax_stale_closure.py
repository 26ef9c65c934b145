"""A closure's cell changes between calls."""

import jax
import numpy as np
import witness


def make():
    rate = 0.5

    @jax.jit
    def scaled(x):
        witness.mark("scaled")
        return x * rate  # <- read

    def set_rate(value):
        nonlocal rate
        rate = value

    return scaled, set_rate


scaled, set_rate = make()
scaled(np.ones((2,), "float32"))
set_rate(8.0)
value = float(scaled(np.ones((2,), "float32"))[0])
witness.say(value=value)
