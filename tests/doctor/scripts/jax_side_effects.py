"""Random numbers, the time, print, and a counter in a global: all of them once, at the trace."""

import random
import time

import jax
import numpy as np
import witness

steps = 0
drawn = []


@jax.jit
def noisy(x):
    global steps
    steps += 1  # <- global
    drawn.append(1)  # <- append
    print("noisy runs")  # <- print
    x = x + random.random()  # <- random
    x = x + np.random.normal(size=3)  # <- numpy
    return x, time.time()  # <- time


results = {tuple(noisy(np.zeros((3,), "float32"))[0].tolist()) for _ in range(4)}
witness.say(traces={"noisy": noisy._cache_size()}, distinct=len(results), steps=[steps, len(drawn)])
