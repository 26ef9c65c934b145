"""Hand-written TensorFlow steps for dynamic sizes: a `tf.function` with unknown dimensions."""

import numpy as np
import tensorflow as tf

from benchmarks import settings as s
from benchmarks.native_tensorflow import Tensor, Variables, adam, mlp, split
from benchmarks.streams import CLASSES, PIXELS, SEQUENCES, Contender


def convolution(params: Variables, x: Tensor) -> Tensor:
    """Embedded tokens, a convolution with ReLU, the mean over the length, a dense layer."""
    table, kernel, bias, last, last_bias = params
    mixed = tf.nn.conv1d(tf.gather(table, x), kernel, 1, "SAME")
    found = tf.reduce_mean(tf.nn.relu(tf.nn.bias_add(mixed, bias)), 1)
    return tf.nn.bias_add(tf.matmul(found, last), last_bias)


def build(stream: str, weights: s.Weights) -> Contender:
    """Returns the step of a stream."""
    params, _ = split(stream, weights)
    apply = adam(params)
    error_sum, error_count = (tf.Variable(tf.constant(0.0)) for _ in range(2))
    traces = 0
    if stream == "rows":
        signature = tf.TensorSpec((None, PIXELS)), tf.TensorSpec((None, CLASSES))
    else:
        signature = tf.TensorSpec((SEQUENCES, None), tf.int32), tf.TensorSpec((SEQUENCES, 1))

    @tf.function(input_signature=signature, autograph=False)
    def train(x: Tensor, y: Tensor) -> Tensor:
        nonlocal traces
        traces += 1
        with tf.GradientTape() as tape:
            error = (mlp(params, [], x) if stream == "rows" else convolution(params, x)) - y
            loss = tf.reduce_mean(tf.square(error))
        apply([tf.convert_to_tensor(grad) for grad in tape.gradient(loss, params)])
        count = tf.cast(tf.shape(x)[0], tf.float32)
        error_sum.assign_add(tf.reduce_mean(tf.abs(error)) * count)
        error_count.assign_add(count)
        return loss

    def step(x: np.ndarray, y: np.ndarray) -> Tensor:
        return train(tf.constant(x), tf.constant(y))

    return Contender(step, lambda: traces, lambda: 0.0)
