"""A data pipeline with map, shuffle and batch; random numbers in it come from TensorFlow, and
NumPy's only inside a py_function, which runs for every element.
"""

import numpy as np
import tensorflow as tf
import witness


def jittered(x):
    return x + np.random.rand(*x.shape).astype("float32")


def prepared(x):
    x = tf.numpy_function(jittered, [x], tf.float32)
    return tf.ensure_shape(x, (3,)) + tf.random.uniform((3,))


@tf.function(input_signature=[tf.TensorSpec((None, 3), tf.float32)])
def mean(batch):
    witness.mark("mean")
    return tf.reduce_mean(batch)


data = tf.data.Dataset.from_tensor_slices(tf.zeros((10, 3))).shuffle(10).map(prepared).batch(4)
values = [float(mean(batch)) for _ in range(2) for batch in data]
assert len(set(values)) == len(values) == 6
witness.say()
