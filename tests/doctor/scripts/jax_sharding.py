"""The same array on another device: compiled again for it, without a trace."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import numpy as np
import witness


@jax.jit
def double(x):
    witness.mark("double")
    return x * 2


first, second = jax.devices()
x = np.ones((4,), "float32")
double(jax.device_put(x, first))
double(jax.device_put(x, second))  # <- second
double(jax.device_put(x, first))
witness.say(programs=double._cache_size())
