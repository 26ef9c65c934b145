"""Losses appended to a list inside the traced function: it gets one symbolic tensor, for good."""

import tensorflow as tf
import witness

losses = []


@tf.function
def step(x):
    witness.mark("step")
    loss = tf.reduce_mean(x)
    losses.append(loss)  # <- leak
    return loss


for _ in range(4):
    step(tf.ones((3,)))
witness.say(length=len(losses))
