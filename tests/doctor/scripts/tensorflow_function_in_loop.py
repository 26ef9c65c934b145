"""tf.function applied inside the loop: each turn makes a function that knows no traces."""

import tensorflow as tf
import witness

weights = tf.Variable(tf.ones((3, 1)))
batch = tf.ones((4, 3))

for _ in range(4):

    @tf.function
    def step(x):
        witness.mark("step")
        return tf.reduce_sum(x @ weights)

    step(batch)  # <- call
    step(batch)

witness.say()
