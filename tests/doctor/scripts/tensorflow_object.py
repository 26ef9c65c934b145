"""A settings object made anew for every call: TensorFlow knows it by identity only."""

import tensorflow as tf
import witness


class Settings:
    def __init__(self, scale):
        self.scale = scale


@tf.function
def scaled(x, settings):
    witness.mark("scaled")
    return x * settings.scale


batch = tf.ones((4,))
for _ in range(4):
    scaled(batch, Settings(2.0))  # <- call

assert witness.COUNTS["scaled"] == 4
witness.say()
