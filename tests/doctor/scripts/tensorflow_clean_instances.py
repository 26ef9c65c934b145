"""Two living objects of one class, used in turn: each has a trace of its own, and needs it."""

import tensorflow as tf
import witness


class Network(tf.Module):
    def __init__(self, units):
        super().__init__()
        self.kernel = tf.Variable(tf.ones((3, units)))

    @tf.function
    def apply(self, x):
        witness.mark("apply")
        return tf.nn.relu(x @ self.kernel)


generator, critic = Network(3), Network(1)
for _ in range(4):
    critic.apply(generator.apply(tf.ones((2, 3))))
witness.say()
