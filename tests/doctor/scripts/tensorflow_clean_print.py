"""print of tensors where AutoGraph is told to convert it: it prints at every step."""

import tensorflow as tf
import witness

builtins = tf.autograph.experimental.Feature.BUILTIN_FUNCTIONS


@tf.function(experimental_autograph_options=builtins)
def step(x):
    witness.mark("step")
    print("mean", tf.reduce_mean(x))
    return x + 1


x = tf.zeros((2,))
for _ in range(3):
    x = step(x)
witness.say()
