"""A list of two tensors, then a tuple of the same two."""

import tensorflow as tf
import witness


@tf.function
def joined(parts):
    witness.mark("joined")
    return tf.concat(parts, 0)


left, right = tf.ones((2, 3)), tf.zeros((4, 3))
joined([left, right])
joined((left, right))  # <- tuple
joined([left, right])
assert joined.experimental_get_tracing_count() == witness.COUNTS["joined"]
witness.say()
