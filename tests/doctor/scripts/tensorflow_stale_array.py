"""A NumPy table edited in place: the program holds a copy from its trace."""

import numpy as np
import tensorflow as tf
import witness

table = np.arange(4, dtype="float32")


@tf.function
def looked_up(index):
    witness.mark("looked_up")
    return tf.gather(table, index)  # <- read


looked_up(tf.constant(3))
table[3] = 100.0
value = float(looked_up(tf.constant(3)))  # <- noticed
witness.say(value=value)
