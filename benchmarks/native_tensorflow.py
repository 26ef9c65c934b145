"""Hand-written TensorFlow steps: variables, one `tf.function`, the fused Adam of the engine."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks import settings as s

Tensor = tf.Tensor
Variables = list[tf.Variable]


def mlp(params: Variables, stats: Variables, x: Tensor) -> Tensor:
    """Dense layers with ReLU on all but the last."""
    *hidden, (kernel, bias) = zip(params[::2], params[1::2], strict=True)
    for hidden_kernel, hidden_bias in hidden:
        x = tf.nn.relu(tf.nn.bias_add(tf.matmul(x, hidden_kernel), hidden_bias))
    return tf.nn.bias_add(tf.matmul(x, kernel), bias)


def batch_norm(x: Tensor, gamma: tf.Variable, beta: tf.Variable, stats: Variables) -> Tensor:
    """Normalizes over the batch, and updates the moving mean and variance."""
    x, *batch = tf.compat.v1.nn.fused_batch_norm(x, gamma, beta, epsilon=s.NORM_EPSILON)
    for moving, new in zip(stats, batch, strict=True):
        moving.assign_sub((moving - new) * (1 - s.NORM_MOMENTUM))
    return x


def convnet(params: Variables, stats: Variables, x: Tensor) -> Tensor:
    """Two convolutions with batch normalization, pooling, dropout, a dense layer."""
    conv_1, gamma_1, beta_1, conv_2, gamma_2, beta_2, kernel, bias = params
    x = batch_norm(tf.nn.conv2d(x, conv_1, 1, "SAME"), gamma_1, beta_1, stats[:2])
    x = tf.nn.max_pool2d(tf.nn.relu(x), 2, 2, "VALID")
    x = batch_norm(tf.nn.conv2d(x, conv_2, 1, "SAME"), gamma_2, beta_2, stats[2:])
    x = tf.nn.dropout(tf.reduce_mean(tf.nn.relu(x), (1, 2)), s.DROPOUT)
    return tf.nn.bias_add(tf.matmul(x, kernel), bias)


def layer_norm(x: Tensor, gamma: tf.Variable, beta: tf.Variable) -> Tensor:
    """Normalizes over the last axis."""
    mean, variance = tf.nn.moments(x, -1, keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, beta, gamma, s.NORM_EPSILON)


def dense(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """A dense layer on the last axis of a sequence, as one matrix product."""
    length, width = x.shape[1:]
    flat = tf.nn.bias_add(tf.matmul(tf.reshape(x, (-1, width)), kernel), bias)
    return tf.reshape(flat, (-1, length, kernel.shape[-1]))


def transformer(params: Variables, stats: Variables, x: Tensor) -> Tensor:
    """One pre-norm attention block, then a mean over the sequence and a dense layer."""
    g_1, b_1, qkv, qkv_bias, out, out_bias, g_2, b_2, w_1, c_1, w_2, c_2, w_3, c_3 = params
    projected = dense(layer_norm(x, g_1, b_1), qkv, qkv_bias)
    heads = tf.reshape(projected, (-1, x.shape[1], 3, s.HEADS, s.KEY_SIZE))
    query, keys, values = tf.unstack(tf.transpose(heads, (2, 0, 3, 1, 4)))
    scores = tf.matmul(query * s.KEY_SIZE**-0.5, keys, transpose_b=True)
    mixed = tf.transpose(tf.matmul(tf.nn.softmax(scores), values), (0, 2, 1, 3))
    x = x + dense(tf.reshape(mixed, (-1, x.shape[1], s.HEADS * s.KEY_SIZE)), out, out_bias)
    x = x + dense(tf.nn.relu(dense(layer_norm(x, g_2, b_2), w_1, c_1)), w_2, c_2)
    return tf.nn.bias_add(tf.matmul(tf.reduce_mean(x, 1), w_3), c_3)


NETWORKS = {"convnet": convnet, "transformer": transformer}


def split(network: str, weights: s.Weights) -> tuple[Variables, Variables]:
    """Returns the trained variables and the moving statistics, from Keras weights."""
    if network == "transformer":  # one product computes query, key and value
        g_1, b_1, *qkv, out, out_bias = weights[:10]
        kernel = np.concatenate([w.reshape(len(w), -1) for w in qkv[::2]], axis=1)
        bias = np.concatenate([b.reshape(-1) for b in qkv[1::2]])
        out = out.reshape(-1, out.shape[-1])
        weights = [g_1, b_1, kernel, bias, out, out_bias, *weights[10:]]
    # In the convnet, the weights of each normalization end with its two statistics.
    moving = (3, 4, 8, 9) if network == "convnet" else ()
    params = [tf.Variable(tf.constant(w)) for i, w in enumerate(weights) if i not in moving]
    return params, [tf.Variable(tf.constant(weights[i]), trainable=False) for i in moving]


def adam(params: Variables) -> Callable[[Sequence[Tensor]], None]:
    """Returns a function that applies gradients by the fused Adam, with its own moments."""
    first, second = ([tf.Variable(tf.zeros_like(p)) for p in params] for _ in range(2))
    count = tf.Variable(tf.constant(0.0))

    def apply(grads: Sequence[Tensor]) -> None:
        steps = count.assign_add(1.0)
        powers = tf.pow(s.BETA_1, steps), tf.pow(s.BETA_2, steps)
        for param, m, v, grad in zip(params, first, second, grads, strict=True):
            tf.raw_ops.ResourceApplyAdam(
                var=param.handle,
                m=m.handle,
                v=v.handle,
                beta1_power=powers[0],
                beta2_power=powers[1],
                lr=s.LEARNING_RATE,
                beta1=s.BETA_1,
                beta2=s.BETA_2,
                epsilon=s.EPSILON,
                grad=grad,
            )

    return apply


def build(network: str, weights: s.Weights, jit_compile: bool) -> s.Step:
    """Returns the step of a network, which starts from the weights of its Keras model."""
    params, stats = split(network, weights)
    apply = adam(params)
    error_sum, error_count = (tf.Variable(tf.constant(0.0)) for _ in range(2))

    def train(x: Tensor, y: Tensor) -> Tensor:
        with tf.GradientTape() as tape:
            error = NETWORKS.get(network, mlp)(params, stats, x) - y
            loss = tf.reduce_mean(tf.square(error))
        apply(tape.gradient(loss, params))
        error_sum.assign_add(tf.reduce_mean(tf.abs(error)) * s.BATCH)
        error_count.assign_add(s.BATCH)
        return loss

    function: Any = tf.function(train, jit_compile=jit_compile, autograph=False)
    concrete = None

    def step(x: np.ndarray, y: np.ndarray) -> Tensor:
        # Every batch has the same shape: the concrete function avoids the lookup of a trace.
        nonlocal concrete
        if concrete is None:
            concrete = function.get_concrete_function(tf.constant(x), tf.constant(y))
        return concrete(tf.constant(x), tf.constant(y))

    return step


def variants(network: str, weights: s.Weights) -> dict[str, s.Step]:
    """Returns the hand-written steps to measure, by name."""
    return {
        "tf.function": build(network, weights, jit_compile=False),
        "XLA": build(network, weights, jit_compile=True),
    }
