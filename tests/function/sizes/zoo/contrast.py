"""Tasks that set rows against each other: contrasts, class centres, penalties and drawn rows."""

from __future__ import annotations

import keras
from keras import ops

import trainstep as ts

from .base import Batch, Built, Tensor, case, floats, ids, mlp, own, squared
from .batchwise import unit


@case("task")
def mixup_by_flip() -> Built:
    model = mlp()

    def loss_of(batch: Batch) -> Tensor:
        x, y = (0.7 * a + 0.3 * ops.flip(a, axis=0) for a in (batch["x"], batch["y"]))
        return ops.mean(squared(y, model(x, training=True)))

    return own(model, loss_of, x=floats(6), y=floats(2))


@case("task")
def info_nce() -> Built:
    model = mlp(4)

    def loss_of(batch: Batch) -> Tensor:
        left = unit(model(batch["left"], training=True))
        right = unit(model(batch["right"], training=True))
        logits = ops.matmul(left, ops.transpose(right)) / 0.2
        own_row = ops.arange(ops.shape(logits)[0])
        loss = keras.losses.sparse_categorical_crossentropy
        return ops.mean(loss(own_row, logits, from_logits=True))

    return own(model, loss_of, left=floats(6), right=floats(6))


@case("task")
def supervised_contrast() -> Built:
    """Rows of one class attract; each row's own place is left out by a diagonal."""
    model = mlp(4)

    def loss_of(batch: Batch) -> Tensor:
        rows = unit(model(batch["x"], training=True))
        others = 1 - ops.eye(ops.shape(rows)[0])
        logits = ops.matmul(rows, ops.transpose(rows)) - 1e9 * (1 - others)
        same = ops.cast(batch["y"][:, None] == batch["y"][None, :], "float32") * others
        scores = ops.sum(same * ops.log_softmax(logits, axis=-1), axis=-1)
        return -ops.mean(scores / (ops.sum(same, axis=-1) + 1))

    return own(model, loss_of, x=floats(6), y=ids(3))


@case("task")
def class_centres_by_segment_sum() -> Built:
    model = mlp(3)

    def loss_of(batch: Batch) -> Tensor:
        rows = model(batch["x"], training=True)
        counts = ops.segment_sum(ops.ones_like(rows), batch["y"], num_segments=4)
        centres = ops.segment_sum(rows, batch["y"], num_segments=4) / (1 + counts)
        return ops.mean(ops.square(rows - ops.take(centres, batch["y"], axis=0)))

    return own(model, loss_of, x=floats(6), y=ids(4))


@case("task")
def best_of_class_by_segment_max() -> Built:
    model = mlp(3)

    def loss_of(batch: Batch) -> Tensor:
        rows = ops.tanh(model(batch["x"], training=True))
        best = ops.segment_max(rows, batch["y"], num_segments=4)
        return ops.mean(ops.square(rows - ops.take(best, batch["y"], axis=0)))

    return own(model, loss_of, x=floats(6), y=ids(4))


@case("task")
def gradient_penalty() -> Built:
    """The slope of the critic at each row should be one: a gradient inside the gradient."""
    critic = mlp(1)

    def loss_of(batch: Batch) -> Tensor:
        score = ops.mean(critic(batch["x"], training=True))
        slope = ts.grad(lambda x: ops.sum(critic(x, training=True)), argnums=0)(batch["x"])
        size = ops.sqrt(ops.sum(ops.square(slope), axis=-1) + 1e-6)
        return score + 10 * ops.mean(ops.square(size - 1))

    return own(critic, loss_of, x=floats(6))


@case("task")
def wasserstein_penalty() -> Built:
    """The same between real and made rows, at places that are drawn."""
    critic, seed = mlp(1), keras.random.SeedGenerator(5)

    def loss_of(batch: Batch) -> Tensor:
        real, made = batch["real"], batch["made"]
        share = keras.random.uniform((ops.shape(real)[0], 1), seed=seed)
        between = share * real + (1 - share) * made
        slope = ts.grad(lambda x: ops.sum(critic(x, training=True)), argnums=0)(between)
        size = ops.sqrt(ops.sum(ops.square(slope), axis=-1) + 1e-6)
        apart = ops.mean(critic(made, training=True)) - ops.mean(critic(real, training=True))
        return apart + 10 * ops.mean(ops.square(size - 1))

    arrays = {"real": floats(6), "made": floats(6)}
    return Built((critic,), loss_of, arrays, others=(seed.state,))


@case("task")
def random_features_of_the_batch() -> Built:
    """Draws of each kind that models use, as many as there are rows."""
    model, seed = mlp(), keras.random.SeedGenerator(6)

    def loss_of(batch: Batch) -> Tensor:
        x = batch["x"]
        rows = ops.shape(x)[0]
        x = x + keras.random.truncated_normal((rows, 6), stddev=0.1, seed=seed)
        keep = keras.random.binomial((rows, 1), 1.0, 0.7, seed=seed)
        pick = keras.random.randint((rows,), 0, 6, seed=seed)
        return ops.mean(squared(batch["y"], model(x * keep + ops.one_hot(pick, 6), training=True)))

    return Built((model,), loss_of, {"x": floats(6), "y": floats(2)}, others=(seed.state,))
