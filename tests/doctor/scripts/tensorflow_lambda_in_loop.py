"""The same without a name: tf.function of a lambda, in a helper that is called again and again."""

import tensorflow as tf
import witness


def norm(x):
    return tf.function(lambda v: (witness.mark("<lambda>"), tf.norm(v))[1])(x)  # <- call


for _ in range(3):
    norm(tf.ones((5,)))
witness.say()
