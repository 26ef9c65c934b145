"""A tf.function method of an object that every turn of the loop makes anew."""

import tensorflow as tf
import witness


class Scaler:
    def __init__(self, factor):
        self.factor = tf.constant(factor)

    @tf.function
    def apply(self, x):
        witness.mark("apply")
        return x * self.factor


batch = tf.ones((4,))
for turn in range(4):
    scaler = Scaler(float(turn))
    scaler.apply(batch)  # <- call
    scaler.apply(batch)

witness.say()
