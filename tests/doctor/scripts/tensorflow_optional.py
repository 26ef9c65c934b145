"""An optional argument: None in most calls, a tensor in some."""

import tensorflow as tf
import witness


@tf.function
def loss_of(error, sample_weight=None):
    witness.mark("loss_of")
    squared = error**2
    if sample_weight is not None:
        squared = squared * sample_weight
    return tf.reduce_mean(squared)


error = tf.ones((6,))
for _ in range(2):
    loss_of(error)
    loss_of(error, tf.ones((6,)))  # <- weighted
assert loss_of.experimental_get_tracing_count() == witness.COUNTS["loss_of"]
witness.say()
