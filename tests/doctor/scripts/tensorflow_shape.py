"""Batches of three sizes, twice over: one trace for each size, none the second time round."""

import tensorflow as tf
import witness

weights = tf.Variable(tf.ones((5, 1)))


@tf.function
def step(x, y):
    witness.mark("step")
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x @ weights - y) ** 2)
    weights.assign_sub(0.01 * tape.gradient(loss, weights))
    return loss


for _ in range(2):
    for size in (10, 20, 7):
        step(tf.ones((size, 5)), tf.zeros((size, 1)))  # <- call

assert step.experimental_get_tracing_count() == witness.COUNTS["step"]
witness.say()
