"""A traced function that calls another, in a loop over a tensor and under a condition."""

import tensorflow as tf
import witness


@tf.function
def inner(x):
    witness.mark("inner")
    return tf.where(x > 0, x, 0.1 * x)


@tf.function
def outer(rows):
    witness.mark("outer")
    total = tf.constant(0.0)
    for row in rows:
        if tf.reduce_sum(row) > 0:
            total += tf.reduce_sum(inner(row))
        else:
            total -= 1.0
    return total


for _ in range(3):
    outer(tf.ones((4, 2)))
inner(tf.ones((2,)))
witness.say()
