"""An entry of a dictionary of settings changes between calls."""

import tensorflow as tf
import witness

config = {"rate": 0.5, "name": "first"}


@tf.function
def scaled(x):
    witness.mark("scaled")
    return x * config["rate"]  # <- read


scaled(tf.ones((2,)))
config["rate"] = 0.25
value = float(scaled(tf.ones((2,)))[0])  # <- noticed
witness.say(value=value)
