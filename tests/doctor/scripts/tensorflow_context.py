"""The same call outside and inside a distribution strategy: a trace for each."""

import tensorflow as tf
import witness


@tf.function
def double(x):
    witness.mark("double")
    return 2 * x


batch = tf.ones((3,))
double(batch)
with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
    double(batch)  # <- scope
double(batch)
witness.say()
