"""Sequences: plain tensor code over the time axis, as it stands in people's own losses."""

from __future__ import annotations

from collections.abc import Callable

from keras import layers, ops

from .base import Batch, Built, Tensor, add, chain, floats, own, squared


def over_time(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Built]:
    """A loss of inputs of shape (n, t, 4) and predictions of shape (n, t, 3)."""

    def build() -> Built:
        model = chain((None, 4), layers.Dense(3, activation="tanh"))

        def loss_of(batch: Batch) -> Tensor:
            return change(batch["x"], model(batch["x"], training=True))

        return own(model, loss_of, x=floats("t", 4))

    return build


def _last(x: Tensor, p: Tensor) -> Tensor:
    return ops.mean(squared(x[:, -1, :3], p[:, -1]))


def _flip(x: Tensor, p: Tensor) -> Tensor:
    return ops.mean(squared(ops.flip(x, axis=1)[..., :3], p))


def _softmax(x: Tensor, p: Tensor) -> Tensor:
    weights = ops.softmax(p[..., :1], axis=1)
    return ops.mean(ops.square(ops.sum(weights * x[..., :3], axis=1)))


def _cumsum(x: Tensor, p: Tensor) -> Tensor:
    return ops.mean(ops.cumsum(p, axis=1) * x[..., :3])


def _running_mean(x: Tensor, p: Tensor) -> Tensor:
    count = ops.cast(ops.arange(1, ops.shape(p)[1] + 1), "float32")
    return ops.mean(squared(x[..., :3], ops.cumsum(p, axis=1) / count[None, :, None]))


def _top_k(x: Tensor, p: Tensor) -> Tensor:
    best, _ = ops.top_k(ops.transpose(p, (0, 2, 1)), 2)
    return ops.mean(ops.square(best)) + ops.mean(x * p[..., :1])


def _flat(x: Tensor, p: Tensor) -> Tensor:
    """All steps of all rows as one long batch, standardised there, and back."""
    rows, steps = ops.shape(p)[0], ops.shape(p)[1]
    flat = ops.reshape(p, (-1, 3))
    flat = (flat - ops.mean(flat, axis=0)) / (ops.std(flat, axis=0) + 0.1)
    return ops.mean(squared(x[..., :3], ops.reshape(flat, (rows, steps, 3))))


def _concatenated(x: Tensor, p: Tensor) -> Tensor:
    both = ops.concatenate([p, x[..., :3]], axis=1)
    return ops.mean(ops.square(both - ops.mean(both, axis=1, keepdims=True)))


def _start_token(x: Tensor, p: Tensor) -> Tensor:
    start = ops.ones_like(p[:, :1])
    moved = ops.concatenate([start, p[:, :-1]], axis=1)
    return ops.mean(squared(x[..., :3], moved))


def _shift(x: Tensor, p: Tensor) -> Tensor:
    return ops.mean(squared(x[:, 1:, :3], p[:, :-1]))


def _difference(x: Tensor, p: Tensor) -> Tensor:
    return ops.mean(ops.abs(ops.diff(p, axis=1))) + ops.mean(x * p[..., :1])


def _every_other(x: Tensor, p: Tensor) -> Tensor:
    return ops.mean(squared(x[:, ::2, :3], p[:, ::2]))


def _roll(x: Tensor, p: Tensor) -> Tensor:
    return ops.mean(squared(ops.roll(x, 1, axis=1)[..., :3], p))


def _best_step(x: Tensor, p: Tensor) -> Tensor:
    best = ops.argmax(x[..., 0], axis=1)
    found = ops.take_along_axis(p, best[:, None, None], axis=1)
    return ops.mean(ops.square(found))


def _sorted(x: Tensor, p: Tensor) -> Tensor:
    """The distance of two distributions over time, as Wasserstein's."""
    return ops.mean(ops.abs(ops.sort(p, axis=1) - ops.sort(x[..., :3], axis=1)))


def _gram(x: Tensor, p: Tensor) -> Tensor:
    """Similarities of all steps, of rows averaged."""
    scores = ops.einsum("nsd,ntd->nst", p, p)
    return ops.mean(ops.logsumexp(scores, axis=-1)) + ops.mean(x * p[..., :1])


def _deviation(x: Tensor, p: Tensor) -> Tensor:
    return ops.mean(ops.var(p, axis=1)) + ops.mean(x * p[..., :1])


def _discounted(x: Tensor, p: Tensor) -> Tensor:
    """Rewards to come, each step counting less: a sum from the end."""
    weight = ops.power(0.9, ops.cast(ops.arange(ops.shape(p)[1]), "float32"))
    to_come = ops.flip(ops.cumsum(ops.flip(x[..., :1] * weight[:, None], axis=1), axis=1), axis=1)
    return ops.mean(squared(to_come, p))


def _divided(x: Tensor, p: Tensor) -> Tensor:
    steps = ops.cast(ops.shape(p)[1], "float32")
    return ops.mean(ops.sum(ops.square(x[..., :3] - p), axis=(1, 2)) / steps)


def _time_first(x: Tensor, p: Tensor) -> Tensor:
    """The time axis in front, weighed by a triangle of the steps."""
    steps = ops.shape(p)[1]
    triangle = ops.tril(ops.ones((steps, steps)))
    mixed = ops.tensordot(triangle, ops.transpose(p, (1, 0, 2)), axes=1)
    return ops.mean(squared(ops.transpose(x, (1, 0, 2))[..., :3], mixed))


TWO_STEPS = (1, 2)
ONE_STEP = (1, 1)

for _name, _change, _least in (
    ("last_step", _last, ONE_STEP),
    ("flip_over_time", _flip, ONE_STEP),
    ("softmax_over_time", _softmax, ONE_STEP),
    ("cumsum_over_time", _cumsum, ONE_STEP),
    ("running_mean_over_time", _running_mean, ONE_STEP),
    ("top_k_over_time", _top_k, TWO_STEPS),
    ("steps_as_rows_and_back", _flat, ONE_STEP),
    ("concatenated_over_time", _concatenated, ONE_STEP),
    ("shifted_with_a_start", _start_token, TWO_STEPS),
    ("shifted_by_one", _shift, TWO_STEPS),
    ("difference_over_time", _difference, TWO_STEPS),
    ("every_other_step", _every_other, ONE_STEP),
    ("rolled_over_time", _roll, ONE_STEP),
    ("best_step_by_argmax", _best_step, ONE_STEP),
    ("sorted_over_time", _sorted, ONE_STEP),
    ("similarities_of_steps", _gram, ONE_STEP),
    ("variance_over_time", _deviation, ONE_STEP),
    ("discounted_sum_to_come", _discounted, ONE_STEP),
    ("divided_by_the_steps", _divided, ONE_STEP),
    ("time_first", _time_first, ONE_STEP),
):
    add(_name, "sequence", over_time(_change), timed=("x",), at_least=_least)
