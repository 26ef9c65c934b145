"""Programs as people wrote them for `Session.run`, against NumPy.

The reference is written in float64; float32 on the other side rounds at 6e-8 an operation, and
Adam divides by the size of the gradient: 1e-5.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import ops

from tests.helpers import normal
from trainstep import graph

FEATURES, CLASSES = 12, 4
Pair = tuple[np.ndarray, np.ndarray]


def batch(seed: int) -> Pair:
    """Sixteen rows, and their classes as rows with a single one."""
    classes = np.random.default_rng(seed).integers(0, CLASSES, 16)
    return normal(16, FEATURES, seed=seed), np.eye(CLASSES, dtype="float32")[classes]


class Reference:
    """Softmax regression with Adam, in NumPy."""

    def __init__(self, weights: np.ndarray, rate: float) -> None:
        self.parameters = [weights.astype("float64"), np.zeros(CLASSES)]
        self.moments = [(0.0, 0.0)] * 2
        self.rate, self.steps = rate, 0

    def loss_and_gradients(self, x: np.ndarray, y: np.ndarray) -> tuple[float, list[np.ndarray]]:
        logits = x @ self.parameters[0] + self.parameters[1]
        logits -= logits.max(1, keepdims=True)
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        error = (p - y) / len(x)
        return float(-np.mean(np.sum(y * np.log(p), 1))), [x.T @ error, error.sum(0)]

    def step(self, x: np.ndarray, y: np.ndarray, clip: float = np.inf) -> tuple[float, float]:
        """Trains; the loss before it, and the norm of the gradients."""
        loss, gradients = self.loss_and_gradients(x, y)
        norm = float(np.sqrt(sum(np.sum(g**2) for g in gradients)))
        self.steps += 1
        for i, g in enumerate(gradients):
            g = g * min(1.0, clip / norm)
            m = 0.9 * self.moments[i][0] + 0.1 * g
            v = 0.999 * self.moments[i][1] + 0.001 * g**2
            self.moments[i] = m, v
            size = self.rate * np.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
            self.parameters[i] = self.parameters[i] - size * m / (np.sqrt(v) + 1e-7)
        return loss, norm


def test_softmax_regression_by_minimize() -> None:
    x = graph.placeholder("float32", [None, FEATURES])
    y = graph.placeholder("float32", [None, CLASSES])
    weights = graph.Variable(graph.random_normal([FEATURES, CLASSES]))
    bias = graph.Variable(ops.zeros([CLASSES]))
    logits = ops.matmul(x, weights) + bias
    prediction = ops.softmax(logits)
    loss = ops.mean(keras.losses.categorical_crossentropy(y, logits, from_logits=True))
    train_op = graph.train.minimize(keras.optimizers.Adam(learning_rate=0.01), loss)

    with graph.Session() as sess:
        sess.run(graph.global_variables_initializer())
        reference = Reference(sess.run(weights), rate=0.01)
        for step in range(5):
            images, labels = batch(step)
            _, loss_value = sess.run([train_op, loss], feed_dict={x: images, y: labels})
            np.testing.assert_allclose(loss_value, reference.step(images, labels)[0], rtol=1e-5)
        rows = sess.run(prediction, feed_dict={x: images})

    np.testing.assert_allclose(rows.sum(1), np.ones(16), rtol=1e-5)
    for mine, theirs in zip((weights, bias), reference.parameters, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs, rtol=1e-5, atol=1e-5)


def test_softmax_regression_with_clipped_gradients() -> None:
    x = graph.placeholder("float32", [None, FEATURES])
    y = graph.placeholder("float32", [None, CLASSES])
    weights = graph.Variable(graph.random_normal([FEATURES, CLASSES]))
    bias = graph.Variable(ops.zeros([CLASSES]))
    logits = x @ weights + bias
    loss = ops.mean(keras.losses.categorical_crossentropy(y, logits, from_logits=True))
    tvars = graph.trainable_variables()
    grads, norm = graph.clip_by_global_norm(graph.gradients(loss, tvars), 0.5)
    optimizer = keras.optimizers.Adam(learning_rate=0.01)
    train_op = graph.train.apply_gradients(optimizer, zip(grads, tvars, strict=True))

    clipped = 0
    with graph.Session() as sess:
        sess.run(graph.global_variables_initializer())
        reference = Reference(weights.eval(), rate=0.01)
        for step in range(5):
            images, labels = batch(step)
            _, *found = sess.run([train_op, loss, norm], feed_dict={x: images, y: labels})
            np.testing.assert_allclose(found, reference.step(images, labels, 0.5), rtol=1e-5)
            clipped += found[1] > 0.5

    assert clipped > 0
    for mine, theirs in zip((weights, bias), reference.parameters, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["in the loss", "in the gradients"])
def test_weights_decay(way: str) -> None:
    """A sum over all variables, as programs had it: also a layer's weights are read at each run."""
    x = graph.placeholder("float32", [None, 2])
    own, layer = graph.Variable([[2.0], [4.0]]), keras.layers.Dense(1)
    loss = ops.mean(x @ own + layer(x))
    sgd = keras.optimizers.SGD(0.25)
    if way == "in the loss":
        decay = sum(ops.sum(ops.square(v)) for v in graph.trainable_variables())
        train_op = graph.train.minimize(sgd, 0.0 * loss + decay)
    else:
        pairs = graph.train.compute_gradients(sgd, 0.0 * loss)
        train_op = graph.train.apply_gradients(sgd, [(g + 2.0 * v, v) for g, v in pairs])
    before = layer.get_weights()[0]

    with graph.Session() as sess:
        for _ in range(3):
            sess.run(train_op, {x: np.ones((3, 2))})

    np.testing.assert_allclose(own.numpy(), [[0.25], [0.5]], rtol=1e-6)
    np.testing.assert_allclose(layer.get_weights()[0], before / 8, rtol=1e-6)


def test_accuracy_and_a_step_counter_beside_the_training() -> None:
    """What nearly every program of the time had: a counter, an accuracy, a rate that is fed."""
    x = graph.placeholder("float32", [None, FEATURES], name="images")
    y = graph.placeholder("int32", [None], name="labels")
    rate = graph.placeholder("float32", [], name="rate")
    weights = graph.Variable(np.zeros((FEATURES, CLASSES), "float32"), name="weights")
    global_step = graph.Variable(0, trainable=False, name="global_step")
    logits = x @ weights
    right = ops.equal(ops.argmax(logits, axis=1), y)
    graph.identity(ops.mean(ops.cast(right, "float32")), name="accuracy")
    loss = ops.mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))
    (slope,) = graph.gradients(loss, [weights])
    with graph.control_dependencies([graph.assign_sub(weights, rate * slope)]):
        graph.assign_add(global_step, 1, name="train")

    images, one_hot = batch(0)
    feed = {"images": images, "labels": one_hot.argmax(1).astype("int32"), "rate": 0.5}
    with graph.Session() as sess:
        first = sess.run("accuracy:0", {k: v for k, v in feed.items() if k != "rate"})
        for step in range(30):
            assert sess.run(["train", "global_step:0"], feed) == [None, step]
        last = sess.run("accuracy:0", feed)

    assert first < last
    assert last > 0.8
    assert global_step.numpy() == 30


def test_a_convolution_by_hand() -> None:
    """A kernel that is learnt from what it did to random rows."""
    wanted = np.array([1.0, -2.0, 0.5], "float32")
    x = graph.placeholder("float32", [None, 8, 1])
    y = graph.placeholder("float32", [None, 6, 1])
    kernel = graph.Variable(graph.random_normal([3, 1, 1], stddev=0.1, seed=1))
    out = ops.conv(x, kernel, padding="valid")
    loss = ops.mean(ops.square(out - y))
    train = graph.train.minimize(keras.optimizers.SGD(0.2), loss)
    rows = normal(32, 8, 1)
    filtered = [np.convolve(row[:, 0], wanted[::-1], "valid") for row in rows]
    answers = np.stack(filtered)[..., None]

    with graph.Session():
        for _ in range(60):
            train.run({x: rows, y: answers})
        # the error shrinks by about 0.6 a step, to below what float32 can tell of numbers near 1
        np.testing.assert_allclose(kernel.eval()[:, 0, 0], wanted, rtol=1e-4, atol=1e-4)
