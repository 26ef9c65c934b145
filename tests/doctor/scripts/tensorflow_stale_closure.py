"""A closure's cell changes between calls."""

import tensorflow as tf
import witness


def make():
    rate = 0.5

    @tf.function
    def scaled(x):
        witness.mark("scaled")
        return x * rate  # <- read

    def set_rate(value):
        nonlocal rate
        rate = value

    return scaled, set_rate


scaled, set_rate = make()
scaled(tf.ones((2,)))
set_rate(8.0)
value = float(scaled(tf.ones((2,)))[0])  # <- noticed
witness.say(value=value)
