"""reduce_retracing: the second size gets a trace for any size, and the sizes after it none."""

import tensorflow as tf
import witness


@tf.function(reduce_retracing=True)
def mean(batch):
    witness.mark("mean")
    return tf.reduce_mean(batch)


for size in (10, 20, 7, 3):
    mean(tf.ones((size, 5)))  # <- call
assert mean.experimental_get_tracing_count() == witness.COUNTS["mean"] == 2
witness.say()
