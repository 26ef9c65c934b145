"""The parts of a record give what the record gives; whatever the operation, and for any size.

Three devices of one process, all of them the processor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("TensorFlow", allow_module_level=True)

import tensorflow as tf

import trainstep as ts
from trainstep._engines import Options
from trainstep._engines.tensorflow.layout import Layout, Record
from trainstep._engines.tensorflow.partition import partition as parts
from trainstep._function.function import Function
from trainstep._function.settings import StepSettings

DEVICES = ["/CPU:0"] * 3


def in_parts(fn: Callable[..., Any], inputs: list[Any], *, varies: bool, given: list[Any]) -> Any:
    """What a function of rows gives in parts: recorded with `given`, and run on `inputs`."""
    kept: list[Any] = []

    def body(*tensors: Any) -> Any:
        outputs = [tf.convert_to_tensor(x) for x in fn(*tensors)]
        kept.append((tf.compat.v1.get_default_graph(), tensors, outputs))
        return outputs

    rows = len(given[0])
    axes = [["n" if x.ndim and len(x) == rows else None, *[None] * (x.ndim - 1)] for x in given]
    specs = [
        tf.TensorSpec([None if a else n for n, a in zip(x.shape, of, strict=True)], x.dtype)
        if varies
        else tf.TensorSpec(x.shape, x.dtype)
        for x, of in zip(given, axes, strict=True)
    ]
    recorded = tf.function(body, autograph=False).get_concrete_function(*specs)
    ((graph, tensors, outputs),) = kept
    record = Record(graph, tensors, outputs, [], [])
    concrete = Layout(DEVICES).partition(
        record, given, axes if varies else None, lambda new, before: None, []
    )
    assert recorded is not None
    return concrete(*map(tf.constant, inputs))


def assert_same(fn: Callable[..., Any], *inputs: Any, varies: bool, given: Any = None) -> None:
    expected = fn(*map(tf.constant, inputs))
    found = in_parts(fn, list(inputs), varies=varies, given=list(given or inputs))
    assert len(found) == len(expected)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


def normal(*shape: int) -> Any:
    return np.random.default_rng(0).normal(size=shape)


W = normal(4, 5)
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "a row": lambda x: x * 2 + tf.tanh(x),
    "a bias": lambda x: x + W[0, :4],
    "a column": lambda x: x / tf.reduce_sum(x, -1, keepdims=True),
    "the mean": lambda x: x - tf.reduce_mean(x, 0),
    "the mean of all": lambda x: x - tf.reduce_mean(x),
    "moments": lambda x: tf.nn.batch_normalization(x, *tf.nn.moments(x, [0]), None, None, 1e-3),
    "the largest": lambda x: x / tf.reduce_max(tf.abs(x)),
    "the largest of each": lambda x: x - tf.reduce_max(x, -1, keepdims=True),
    "where it is": lambda x: tf.argmax(x, -1),
    "where it is among the rows": lambda x: tf.argmax(x, 0),
    "a matrix": lambda x: x @ W,
    "one from the left": lambda x: tf.matmul(W, x, transpose_a=True, transpose_b=True),
    "a product over rows": lambda x: tf.matmul(x, x, transpose_a=True),
    "every row with every other": lambda x: tf.matmul(x, x, transpose_b=True),
    "pairs": lambda x: tf.norm(x[:, None] - x[None], axis=-1),
    "a bias added": lambda x: tf.nn.bias_add(x, W[0, :4]),
    "softmax": tf.nn.softmax,
    "softmax over rows": lambda x: tf.nn.softmax(x, 0),
    "log softmax": tf.nn.log_softmax,
    "sorted": lambda x: tf.sort(x, -1),
    "rows sorted": lambda x: tf.sort(x, 0),
    "the first two": lambda x: tf.math.top_k(x, 2)[0],
    "running sums": lambda x: tf.cumsum(x, 1),
    "running sums of rows": lambda x: tf.cumsum(x, 0),
    "split": lambda x: tf.reshape(tf.transpose(tf.reshape(x, (-1, 2, 2)), (0, 2, 1)), (-1, 4)),
    "joined": lambda x: tf.reshape(tf.reduce_mean(tf.reshape(x, (-1, 2)), -1), (-1, 2)),
    "flat": lambda x: tf.reshape(x, [-1]) * 2,
    "transposed and flat": lambda x: tf.reshape(tf.transpose(x), [-1]) * 2,
    "a part": lambda x: x[:, 1:3] * x[:, :1],
    "a part of the rows": lambda x: x[1:3] * 2,
    "one row": lambda x: x[2] + x[-1],
    "a column taken": lambda x: x[:, 2],
    "with dots": lambda x: x[..., None, 1:][:, 0],
    "sliced": lambda x: tf.slice(x, [0, 1], [-1, 2]),
    "turned": lambda x: tf.reverse(x, [0]),
    "columns turned": lambda x: tf.reverse(x, [1]),
    "padded": lambda x: tf.pad(x, [[0, 0], [1, 2]]),
    "rows padded": lambda x: tf.pad(x, [[1, 0], [0, 0]]),
    "tiled": lambda x: tf.tile(x, [1, 2]),
    "rows tiled": lambda x: tf.tile(x, [2, 1]),
    "with itself": lambda x: tf.concat([x, x * 2], 1),
    "rows with rows": lambda x: tf.concat([x, x * 2], 0),
    "stacked": lambda x: tf.stack([x, x * 2], 1),
    "stacked first": lambda x: tf.stack([x, x * 2], 0),
    "with ones": lambda x: tf.concat([x, tf.ones((tf.shape(x)[0], 1), x.dtype)], 1),
    "unstacked": lambda x: tf.unstack(x, axis=1)[1] + tf.unstack(x, axis=1)[2],
    "in two": lambda x: tf.split(x, 2, axis=1)[1],
    "longer": lambda x: tf.reduce_sum(tf.broadcast_to(x[:, None], (tf.shape(x)[0], 3, 4)), 1),
    "shorter": lambda x: tf.squeeze(tf.reduce_sum(x, 1, keepdims=True), 1),
    "squeezed": lambda x: tf.squeeze(tf.expand_dims(tf.expand_dims(x, 0), -1), [0, 3]),
    "chosen": lambda x: tf.where(x > 0, x, 0.0),
    "a constant of all rows": lambda x: x * tf.fill(tf.shape(x), tf.constant(2.0, x.dtype)),
    "numbers of all rows": lambda x: x * tf.cast(tf.range(tf.shape(x)[0])[:, None], x.dtype),
    "how many": lambda x: x / tf.cast(tf.size(x), x.dtype) + tf.cast(tf.rank(x), x.dtype),
    "of whole things": lambda x: tf.constant(W) * 3 + tf.reduce_sum(x),
    "taken by number": lambda x: tf.gather(x, tf.argmax(x, -1), axis=1, batch_dims=1),
    "columns taken": lambda x: tf.gather(x, [2, 0], axis=1),
    "rows taken": lambda x: tf.gather(x, [0, 0]),
    "an embedding": lambda x: tf.gather(W, tf.clip_by_value(tf.cast(tf.abs(x), tf.int32), 0, 3)),
    "one hot": lambda x: tf.one_hot(tf.argmax(x, -1), 4, axis=0),
    "sums of sums": lambda x: tf.reduce_sum(tf.reduce_sum(x, 0)[None] * 2),
    "a sum seen twice": lambda x: tf.reshape(tf.reduce_sum(x, 0), (2, 2)) * tf.reduce_sum(x),
    "any": lambda x: tf.reduce_any(x > 3),
    "masked": lambda x: tf.reduce_sum(tf.boolean_mask(x, x[:, 0] > 0)),
    "counted": lambda x: tf.math.count_nonzero(x > 0) / tf.shape(x, tf.int64)[0],
    "einsum": lambda x: tf.einsum("ni,ij,nj->n", x, W[:, :4], x),
    "einsum over rows": lambda x: tf.einsum("ni,nj->ij", x, x),
    "attention": lambda x: tf.matmul(
        tf.nn.softmax(
            tf.matmul(tf.reshape(x, (-1, 2, 2)), tf.reshape(x, (-1, 2, 2)), transpose_b=True)
        ),
        tf.reshape(x, (-1, 2, 2)),
    ),
    "a loop": lambda x: tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * x), (0, x))[1],
    "a branch": lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: -x),
}
SIZES = [8, 7, 2, 1]


@pytest.mark.parametrize("varies", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name: str, varies: bool) -> None:
    for count in SIZES:
        if count < 3 and name in ("one row", "a part of the rows"):
            continue
        given = [normal(8, 4)] if varies else None
        assert_same(lambda x: [OPERATIONS[name](x)], normal(count, 4), varies=varies, given=given)


GRADIENTS: dict[str, Callable[..., Any]] = {
    "dense": lambda x, w: tf.reduce_mean(tf.tanh(x @ w) ** 2),
    "broadcast": lambda x, w: tf.reduce_mean((x @ w + w[:1]) * w[0] / (1 + w[:1] ** 2)),
    "batch norm": lambda x, w: tf.reduce_mean(
        tf.nn.relu(tf.nn.batch_normalization(x @ w, *tf.nn.moments(x @ w, [0]), w[0], None, 1e-3))
    ),
    "softmax": lambda x, w: tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(tf.argmax(x, -1), x @ w)
    ),
    "soft labels": lambda x, w: tf.reduce_mean(
        tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(x @ w * 2), x @ w)
    ),
    "regularized": lambda x, w: tf.reduce_mean(tf.abs(x @ w)) + tf.nn.l2_loss(w),
    "of all": lambda x, w: tf.nn.l2_loss(x @ w) / tf.cast(tf.shape(x)[0], x.dtype),
    "embedding": lambda x, w: tf.reduce_mean(
        tf.gather(w, tf.clip_by_value(tf.cast(tf.abs(x), tf.int32), 0, 3)) ** 2
    ),
    "parts": lambda x, w: (
        tf.reduce_sum((x @ w)[:, 1:3, None] ** 2) + tf.reduce_mean(x[..., 1] ** 2)
    ),
    "heads": lambda x, w: tf.reduce_mean(
        tf.einsum("nij,nkj->nik", *[tf.reshape((x @ w)[:, :4], (-1, 2, 2))] * 2) ** 2
    ),
    "every pair": lambda x, w: tf.reduce_logsumexp(tf.matmul(x @ w, x @ w, transpose_b=True)),
}


@pytest.mark.parametrize("varies", [False, True])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str, varies: bool) -> None:
    def step(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            loss = GRADIENTS[name](x, w)
        found = tape.gradient(loss, [x, w], unconnected_gradients="zero")
        return [loss, *map(tf.convert_to_tensor, found)]

    for count in SIZES:
        given = [normal(8, 4), W] if varies else None
        assert_same(step, normal(count, 4), W, varies=varies, given=given)


@pytest.mark.parametrize("varies", [False, True])
def test_convolution_and_pooling(varies: bool) -> None:
    kernel, depthwise = normal(3, 3, 2, 3), normal(2, 2, 3, 1)

    def step(x: Any, *weights: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, *weights])
            hidden = tf.nn.max_pool2d(tf.nn.conv2d(x, weights[0], 1, "SAME"), 2, 2, "VALID")
            hidden = tf.nn.depthwise_conv2d(hidden, weights[1], [1, 1, 1, 1], "SAME")
            loss = tf.reduce_mean(tf.nn.avg_pool2d(hidden, 2, 2, "VALID") ** 2)
        return [loss, hidden, *tape.gradient(loss, [x, *weights])]

    for count in (7, 1):
        given = [normal(9, 8, 8, 2), kernel, depthwise] if varies else None
        assert_same(step, normal(count, 8, 8, 2), kernel, depthwise, varies=varies, given=given)


def test_each_part_has_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 rows on 3 devices, none multiplies more than three; nothing is gathered."""
    rows = []
    real = parts.Partition.emit

    def emit(self: Any, op: Any, inputs: Any, device: int = 0) -> Any:
        made = real(self, op, inputs, device)
        if op.type == "MatMul":
            rows.append(made.inputs[0].shape)
        return made

    monkeypatch.setattr(parts.Partition, "emit", emit)
    monkeypatch.setattr(parts.Partition, "_joined", None)
    model = keras.Sequential(
        [keras.layers.Input((4,)), keras.layers.Dense(5), keras.layers.Dense(1)]
    )

    def loss(x: Any) -> Any:
        return ts.value_and_grad(lambda: keras.ops.mean(model(x) ** 2), model.trainable_variables)()

    told = Function(loss, StepSettings(options=Options(layout=Layout(DEVICES))))
    told(normal(8, 4).astype("float32"))
    assert rows
    assert not any(8 in shape for shape in rows)
    assert any(list(shape)[:1] == [3] for shape in rows)
