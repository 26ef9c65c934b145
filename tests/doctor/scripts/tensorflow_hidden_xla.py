"""One trace for any size, but XLA compiles it for each: no counter of Python's shows that."""

import tensorflow as tf
import witness


@tf.function(jit_compile=True, input_signature=[tf.TensorSpec((None, 4), tf.float32)])
def step(x):
    witness.mark("step")
    return tf.reduce_sum(tf.tanh(x))


for size in (8, 6, 3, 8, 6):
    step(tf.ones((size, 4)))  # <- call
assert step.experimental_get_tracing_count() == witness.COUNTS["step"] == 1
witness.say()
