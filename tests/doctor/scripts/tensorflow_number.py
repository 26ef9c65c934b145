"""A learning rate that is a Python number: one trace for each value."""

import tensorflow as tf
import witness

weights = tf.Variable(tf.ones((5, 1)))


@tf.function
def descend(x, rate):
    witness.mark("descend")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((x @ weights) ** 2)
    weights.assign_sub(rate * tape.gradient(loss, weights))
    return loss


batch = tf.ones((4, 5))
for epoch in range(4):
    for _ in range(2):
        descend(batch, 0.1 / (epoch + 1))  # <- call

assert descend.experimental_get_tracing_count() == witness.COUNTS["descend"]
witness.say()
