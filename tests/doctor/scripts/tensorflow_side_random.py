"""Random numbers and the time, read while tracing: every later step has the values of the first."""

import random
import time
from random import gauss

import numpy as np
import tensorflow as tf
import witness


@tf.function
def noisy(x):
    x = x + random.random()  # <- random
    x = x + gauss(0.0, 1.0)  # <- imported
    x = x + np.random.rand(3).astype("float32")  # <- numpy
    return x, tf.constant(time.time(), tf.float64)  # <- time


results = [noisy(tf.zeros((3,))) for _ in range(4)]
same = {tuple(x.numpy().tolist()) for x, _ in results}
assert len(same) == len({float(t) for _, t in results}) == 1
witness.say(traces={"noisy": noisy.experimental_get_tracing_count()})
