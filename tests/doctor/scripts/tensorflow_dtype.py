"""The same batch as float32, as float64 and as int32."""

import numpy as np
import tensorflow as tf
import witness


@tf.function
def total(batch):
    witness.mark("total")
    return tf.reduce_sum(batch)


total(np.ones((4, 3), "float32"))
total(np.ones((4, 3), "float64"))  # <- double
total(tf.ones((4, 3), tf.int32))  # <- int
total(np.zeros((4, 3), "float32"))
assert total.experimental_get_tracing_count() == witness.COUNTS["total"]
witness.say()
