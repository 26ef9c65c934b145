"""A global number changes between calls; the program keeps the number of its trace."""

import tensorflow as tf
import witness

temperature = 1.0


@tf.function
def soften(x):
    witness.mark("soften")
    return x / temperature  # <- read


soften(tf.ones((2,)))
temperature = 4.0
value = float(soften(tf.ones((2,)))[0])  # <- noticed
witness.say(value=value)
