"""A helper's default argument is a list, edited after the trace."""

import tensorflow as tf
import witness


def weighted(x, weights=[1.0, 1.0]):  # <- default
    return x * weights[0] + weights[1]  # <- element


@tf.function
def step(x):
    witness.mark("step")
    return weighted(x)  # <- read


step(tf.ones((2,)))
weighted.__defaults__[0][0] = 7.0
value = float(step(tf.ones((2,)))[0])  # <- noticed
witness.say(value=value)
