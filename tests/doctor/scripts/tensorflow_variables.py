"""The first call creates the variable: that trace is thrown away, and a second one is made."""

import tensorflow as tf
import witness


class Linear(tf.Module):
    def __init__(self):
        super().__init__()
        self.kernel = None

    @tf.function
    def apply(self, x):
        witness.mark("apply")
        if self.kernel is None:
            self.kernel = tf.Variable(tf.ones((x.shape[-1], 2)))
        return x @ self.kernel


linear = Linear()
for _ in range(3):
    linear.apply(tf.ones((4, 3)))  # <- call
witness.say()
