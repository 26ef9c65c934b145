"""An entry of a dictionary of settings changes between calls."""

import jax
import numpy as np
import witness

config = {"rate": 0.5, "name": "first"}


@jax.jit
def scaled(x):
    witness.mark("scaled")
    return x * config["rate"]  # <- read


scaled(np.ones((2,), "float32"))
config["rate"] = 0.25
value = float(scaled(np.ones((2,), "float32"))[0])
witness.say(value=value)
