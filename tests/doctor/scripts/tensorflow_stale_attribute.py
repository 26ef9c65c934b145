"""An attribute of the object whose method was traced, and one of a settings object, change."""

import tensorflow as tf
import witness


class Settings:
    weight = 1.0


settings = Settings()


class Loss:
    def __init__(self):
        self.margin = 0.5

    @tf.function
    def of(self, x):
        witness.mark("of")
        hinge = tf.maximum(0.0, self.margin - x)  # <- margin
        return settings.weight * tf.reduce_sum(hinge)  # <- weight


loss = Loss()
loss.of(tf.zeros((2,)))
loss.margin = 2.0
settings.weight = 3.0
value = float(loss.of(tf.zeros((2,))))  # <- noticed
witness.say(value=value)
