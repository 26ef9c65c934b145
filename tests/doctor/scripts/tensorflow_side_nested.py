"""A random number drawn two calls below the traced function, in a plain helper under AutoGraph."""

import random

import tensorflow as tf
import witness

random.seed(1)


def noise():
    return random.uniform(-1.0, 1.0)  # <- draw


def perturbed(x):
    return x + noise()


@tf.function
def step(x):
    witness.mark("step")
    total = tf.constant(0.0)
    for row in x:
        total += tf.reduce_sum(perturbed(row))
    return total


values = {float(step(tf.ones((3, 2)))) for _ in range(4)}
witness.say(distinct=len(values))
