"""Tasks whose loss mixes the rows of a batch: padding that is not masked would change them all."""

from __future__ import annotations

from collections.abc import Callable

from keras import ops

from .base import Batch, Built, Tensor, add, floats, mlp, own, squared


def unit(x: Tensor) -> Tensor:
    """Rows of length one."""
    return x / ops.sqrt(ops.sum(ops.square(x), axis=-1, keepdims=True) + 1e-6)


def distances(x: Tensor) -> Tensor:
    """The squared distances of all rows from all rows."""
    square = ops.sum(ops.square(x), axis=-1)
    return square[:, None] + square[None, :] - 2 * ops.matmul(x, ops.transpose(x))


# What happens to the rows' errors, or to the rows of the prediction


def of_errors(reduce: Callable[[Tensor], Tensor]) -> Callable[[], Built]:
    """A task whose loss is a function of the errors of all rows, of shape (n,)."""

    def build() -> Built:
        model = mlp()

        def loss_of(batch: Batch) -> Tensor:
            return reduce(squared(batch["y"], model(batch["x"], training=True)))

        return own(model, loss_of, x=floats(6), y=floats(2))

    return build


def of_rows(reduce: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Built]:
    """A task whose loss is a function of targets and predictions, each of shape (n, 3)."""

    def build() -> Built:
        model = mlp(3)

        def loss_of(batch: Batch) -> Tensor:
            return reduce(batch["y"], model(batch["x"], training=True))

        return own(model, loss_of, x=floats(6), y=floats(3))

    return build


def _soft_ranks(errors: Tensor) -> Tensor:
    """Weighs the errors by their ranks."""
    ranks = ops.argsort(ops.argsort(errors))
    return ops.mean(errors * ops.cast(ranks, "float32"))


def _roll(y: Tensor, p: Tensor) -> Tensor:
    return ops.mean(squared(y, p) * squared(ops.roll(y, 1, axis=0), p))


def _strided(y: Tensor, p: Tensor) -> Tensor:
    return ops.mean(squared(y, p)[::2]) + ops.mean(ops.square(p[-1]))


def _decorrelated(y: Tensor, p: Tensor) -> Tensor:
    """The cross-correlation of two views should be the identity, as in Barlow Twins."""
    y = (y - ops.mean(y, axis=0)) / (ops.std(y, axis=0) + 0.1)
    p = (p - ops.mean(p, axis=0)) / (ops.std(p, axis=0) + 0.1)
    rows = ops.cast(ops.shape(p)[0], "float32")
    correlation = ops.matmul(ops.transpose(y), p) / rows
    return ops.sum(ops.square(correlation - ops.eye(3)))


def _through_pairs(y: Tensor, p: Tensor) -> Tensor:
    """Each row is cut in two and joined again, in a tensor of twice as many rows."""
    both = ops.concatenate([y, p], axis=-1)
    halves = ops.reshape(both, (-1, 3))
    scaled = halves / (1 + ops.mean(ops.abs(halves), axis=0))
    again = ops.reshape(scaled, (-1, 6))
    return ops.mean(squared(again[:, :3], again[:, 3:]))


def _twice(y: Tensor, p: Tensor) -> Tensor:
    both = ops.concatenate([p, y], axis=0)
    centred = both - ops.mean(both, axis=0)
    return ops.mean(ops.square(ops.matmul(centred, ops.transpose(centred)))) / 9


def _attention(y: Tensor, p: Tensor) -> Tensor:
    weights = ops.softmax(ops.matmul(p, ops.transpose(p)), axis=-1)
    return ops.mean(squared(y, ops.matmul(weights, p)))


def _triplet(y: Tensor, p: Tensor) -> Tensor:
    """Far targets should have far predictions: hinges over all pairs."""
    near = ops.cast(distances(y) < 3, "float32")
    apart = distances(p)
    return ops.mean(near * apart + (1 - near) * ops.relu(1 - apart))


def _any(y: Tensor, p: Tensor) -> Tensor:
    scale = ops.where(ops.any(ops.abs(y) > 30), 0.1, 1.0)
    return scale * ops.mean(squared(y, p))


def _stopped(y: Tensor, p: Tensor) -> Tensor:
    centre = ops.stop_gradient(ops.mean(p, axis=0, keepdims=True))
    return ops.mean(squared(y, p - centre))


def _scan(y: Tensor, p: Tensor) -> Tensor:
    """A recurrence over the rows."""

    def move(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        carry = 0.5 * carry + row
        return carry, carry

    last, every = ops.scan(move, ops.zeros((3,)), p)
    return ops.mean(squared(y, every)) + ops.mean(ops.square(last))


def _mapped(y: Tensor, p: Tensor) -> Tensor:
    """A function of one row, over all rows."""
    outer = ops.vectorized_map(lambda row: ops.sum(ops.outer(row, row)), p)
    return ops.mean(outer + squared(y, p))


def _condition(y: Tensor, p: Tensor) -> Tensor:
    error = ops.mean(squared(y, p))
    return ops.cond(ops.mean(y) > 0, lambda: error, lambda: 2 * error)


def _while(y: Tensor, p: Tensor) -> Tensor:
    """Halves the error's scale until it is small; the count depends on the whole batch."""
    error = ops.mean(squared(y, p))
    scale = ops.while_loop(
        lambda scale: scale * ops.stop_gradient(error) > 0.5, lambda scale: (scale / 2,), (1.0,)
    )
    return ops.stop_gradient(ops.convert_to_tensor(scale[0])) * error


def _fori(y: Tensor, p: Tensor) -> Tensor:
    """A few power iterations with the batch's second moment, which gradients pass around."""
    moment = ops.stop_gradient(ops.matmul(ops.transpose(p), p))
    vector = ops.fori_loop(
        0, 3, lambda i, v: unit(ops.matmul(moment, v[:, None])[:, 0]), ops.ones((3,))
    )
    return ops.mean(ops.square(ops.matmul(p, vector[:, None]))) + ops.mean(squared(y, p))


def _distribution(y: Tensor, p: Tensor) -> Tensor:
    return -ops.sum(ops.softmax(y[:, 0], axis=0) * ops.log_softmax(p[:, 0], axis=0))


def _standardised(y: Tensor, p: Tensor) -> Tensor:
    return ops.mean(squared((y - ops.mean(y, axis=0)) / (ops.std(y, axis=0) + 0.1), p))


def _hardest(errors: Tensor) -> Tensor:
    return ops.mean(ops.top_k(errors, 2)[0])


def _hardest_row(y: Tensor, p: Tensor) -> Tensor:
    """The row of the largest error, found by its index."""
    return ops.sum(ops.square(ops.take(y - p, ops.argmax(squared(y, p)), axis=0)))


def _alternating(errors: Tensor) -> Tensor:
    """Rows with odd numbers count half."""
    odd = ops.arange(ops.shape(errors)[0]) % 2
    return ops.mean(errors * (1 - 0.5 * ops.cast(odd, "float32")))


add("worst_example", "task", of_errors(ops.max))
add("log_sum_exp_of_errors", "task", of_errors(ops.logsumexp))
add("product_of_errors", "task", of_errors(lambda errors: ops.prod(0.5 + errors)))
add("hard_mining_by_top_k", "task", of_errors(_hardest), at_least=(2, 1))
add("ranked_errors", "task", of_errors(_soft_ranks))
add("sorted_errors", "task", of_errors(lambda errors: ops.mean(ops.cumsum(ops.sort(errors)))))
add("median_of_errors", "task", of_errors(ops.median))
add("rows_by_number", "task", of_errors(_alternating))
add("cumulative_sum_over_batch", "task", of_rows(lambda y, p: ops.mean(y * ops.cumsum(p, axis=0))))
add("variance_over_batch", "task", of_rows(lambda y, p: ops.sum(ops.var(y - p, axis=0))))
add("norm_over_batch", "task", of_rows(lambda y, p: ops.norm(y - p)))
add("rolled_batch", "task", of_rows(_roll))
add("every_other_row_and_the_last", "task", of_rows(_strided))
add("hardest_row_by_argmax", "task", of_rows(_hardest_row))
add("decorrelated_views", "task", of_rows(_decorrelated))
add("reshaped_to_pairs_and_back", "task", of_rows(_through_pairs))
add("batch_concatenated_with_itself", "task", of_rows(_twice))
add("attention_over_batch", "task", of_rows(_attention))
add("pairwise_hinges", "task", of_rows(_triplet))
add("any_over_batch", "task", of_rows(_any))
add("batch_softmax", "task", of_rows(_distribution))
add("targets_standardised_by_batch", "task", of_rows(_standardised))
add("stopped_gradient_of_the_mean", "task", of_rows(_stopped))
add("scan_over_batch", "task", of_rows(_scan))
add("vectorized_map_over_batch", "task", of_rows(_mapped))
add("cond_on_batch_mean", "task", of_rows(_condition))
add("while_loop_on_batch_mean", "task", of_rows(_while))
add("fori_loop_on_batch_moment", "task", of_rows(_fori))
