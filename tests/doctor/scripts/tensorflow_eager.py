"""A training loop without tf.function: each step runs operation by operation."""

import tensorflow as tf
import witness

weights = tf.Variable(tf.ones((3, 1)))
batch = tf.ones((4, 3))

for _ in range(5):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((batch @ weights) ** 2)
    gradient = tape.gradient(loss, weights)  # <- gradient
    weights.assign_sub(0.1 * gradient)

witness.say(loss=float(loss))
