"""A symbolic tensor kept in an attribute of the object that was called."""

import tensorflow as tf
import witness


class Net:
    def __init__(self):
        self.hidden = None

    @tf.function
    def forward(self, x):
        witness.mark("forward")
        self.hidden = tf.nn.relu(x)  # <- leak
        return tf.reduce_sum(self.hidden)


net = Net()
for _ in range(3):
    net.forward(tf.ones((3,)))
witness.say(kept=type(net.hidden).__name__)
