"""The parts of a record, run side by side, give what the record gives; whatever the operation.

Threads stand for processes: what they send each other is added up between two barriers.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import keras
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("PyTorch", allow_module_level=True)

import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import trainstep as ts
from trainstep._engines.contract import Refused
from trainstep._engines.torch import collectives
from trainstep._engines.torch.partition.partition import Rows, partitioned
from trainstep._engines.torch.partition.shapes import dynamic_sizes, fixed_sizes
from trainstep._engines.torch.symbolic_sizes import DynamicSizes

PROCESSES = 3


class Together:
    """Sums over threads."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(PROCESSES, timeout=60)
        self.given: dict[int, Any] = {}
        self.rank = threading.local()
        self.messages = 0

    def reduce(self, tensor: Any) -> None:
        self.given[self.rank.index] = tensor.clone()
        if self.barrier.wait() == 0:
            self.messages += 1
        tensor.copy_(sum(self.given[index] for index in range(PROCESSES)))
        self.barrier.wait()


Batch = tuple[bool, ...]


def exact(fn: Callable[..., Any], inputs: Sequence[Any], batch: Batch) -> Callable[[Rows], Any]:
    """What makes the parts of a function, recorded for these inputs."""
    module = make_fx(fn)(*(x.clone() for x in inputs))

    def made(rows: Rows) -> Any:
        shapes = fixed_sizes(module, [x.clone() for x in inputs], rows.total)
        return partitioned(module, shapes, batch, rows)

    return made


def varying(
    fn: Callable[..., Any], inputs: Sequence[Any], batch: Batch, axes: Any = None
) -> Callable[[Rows], Any]:
    """The same, recorded for any number of rows, or for the sizes that have names."""
    axes = axes or [
        tuple("rows" if b and axis == 0 else None for axis in range(x.ndim))
        for x, b in zip(inputs, batch, strict=True)
    ]
    name = axes[0][0]
    sizes = DynamicSizes(axes)
    module = sizes.record(fn, inputs)
    violated_assumption = sizes.assumptions()
    count = name or inputs[0].shape[0]
    shapes = dynamic_sizes(
        module, [], inputs, axes=axes, rows=count, violated_assumption=violated_assumption
    )
    partitioned(module, shapes, batch, None if name else Rows(count, 0, 1))  # it may be refused

    def made(rows: Rows) -> Any:
        wrong = violated_assumption({"rows": rows.total, "time": 6})
        if wrong:
            raise Refused(wrong)
        if name is None:
            return partitioned(module, shapes, batch, rows)
        return functools.partial(partitioned(module, shapes, batch, None), *rows)

    return made


def in_parts(
    make: Callable[[Rows], Any], inputs: Sequence[Any], batch: Batch
) -> tuple[list[list[Any]], int]:
    """What each thread gets of a function of rows, and how often they sent something."""
    count = inputs[0].shape[0]
    together, results = Together(), [[] for _ in range(PROCESSES)]

    def run(index: int) -> None:
        together.rank.index = index
        rows = Rows(count, count * index // PROCESSES, count * (index + 1) // PROCESSES)
        part = make(rows)
        own = [
            x[rows.start : rows.stop] if b else x.clone()
            for x, b in zip(inputs, batch, strict=True)
        ]
        found = part(*own)
        results[index] = list(found) if isinstance(found, (list, tuple)) else [found]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "reduce", together.reduce)
        threads = [threading.Thread(target=run, args=(index,)) for index in range(PROCESSES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    return results, together.messages


def assert_same(
    fn: Callable[..., Any],
    *inputs: Any,
    batch: Batch | None = None,
    make: Callable[[Rows], Any] | None = None,
) -> int:
    """Parts give what a function does; returns how often they sent something."""
    batch = batch or tuple(True for x in inputs)
    make = make or exact(fn, inputs, batch)
    expected = fn(*(x.clone() for x in inputs))
    expected = list(expected) if isinstance(expected, (list, tuple)) else [expected]
    found, messages = in_parts(make, inputs, batch)
    for each in found:
        for a, b in zip(expected, each, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    return messages


def normal(*shape: int) -> Any:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


W = normal(4, 5)
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "a row": lambda x: x * 2 + torch.tanh(x),
    "a bias": lambda x: x + W[0, :4],
    "a column": lambda x: x / x.sum(-1, keepdim=True),
    "the mean": lambda x: x - x.mean(0),
    "the mean of all": lambda x: x - x.mean(),
    "a variance": lambda x: (x - x.mean(0)) * torch.rsqrt(x.var(0) + 1e-3),
    "the largest": lambda x: x / x.abs().max(),
    "the largest of each": lambda x: x - x.amax(-1, keepdim=True),
    "where it is": lambda x: x.argmax(-1),
    "where it is among the rows": lambda x: x.argmax(0),
    "a matrix": lambda x: x @ W,
    "one from the left": lambda x: W.t() @ x.t(),
    "a product over rows": lambda x: x.t() @ x,
    "every row with every other": lambda x: x @ x.t(),
    "linear": lambda x: F.linear(x, W.t(), W[0]),
    "softmax": lambda x: torch.softmax(x, -1),
    "softmax over rows": lambda x: torch.softmax(x, 0),
    "log softmax": lambda x: torch.log_softmax(x, 1),
    "layer norm": lambda x: F.layer_norm(x, [4], W[:, 0], W[:, 1]),
    "sorted": lambda x: torch.sort(x, -1)[0],
    "rows sorted": lambda x: torch.sort(x, 0)[0],
    "running sums": lambda x: torch.cumsum(x, 1),
    "running sums of rows": lambda x: torch.cumsum(x, 0),
    "split": lambda x: x.view(-1, 2, 2).transpose(1, 2).reshape(-1, 4),
    "joined": lambda x: x.view(-1, 2, 2).reshape(-1, 2).mean(-1).view(-1, 2),
    "flat": lambda x: x.reshape(-1) * 2,
    "transposed and flat": lambda x: x.t().reshape(-1) * 2,
    "a part": lambda x: x[:, 1:3] * x[:, :1],
    "a part of the rows": lambda x: x[1:3] * 2,
    "one row": lambda x: x[2] + x[-1],
    "a column taken": lambda x: x[:, 2],
    "turned": lambda x: x.flip(0),
    "with itself": lambda x: torch.cat([x, x * 2], 1),
    "rows with rows": lambda x: torch.cat([x, x * 2], 0),
    "stacked": lambda x: torch.stack([x, x * 2], 1),
    "stacked first": lambda x: torch.stack([x, x * 2], 0),
    "with ones": lambda x: torch.cat([x, torch.ones(x.shape[0], 1, dtype=x.dtype)], 1),
    "unbound": lambda x: x.unbind(1)[1] + x.unbind(1)[2],
    "rows unbound": lambda x: x.unbind(0)[0],
    "longer": lambda x: x.unsqueeze(1).expand(-1, 3, -1).sum(1),
    "shorter": lambda x: x.sum(1, keepdim=True).squeeze(1),
    "squeezed": lambda x: x.unsqueeze(0).squeeze(0).unsqueeze(-1).squeeze(-1),
    "chosen": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "a constant of all rows": lambda x: x * torch.full(x.shape, 2.0, dtype=x.dtype),
    "numbers of all rows": lambda x: x * torch.arange(x.shape[0]).view(-1, 1),
    "in place": lambda x: x.clone().mul_(2).add_(x),
    "in place, of a sum": lambda x: x.sum(0).mul_(2),
    "of whole things": lambda x: W.clone().mul_(3) + x.sum(),
    "taken by number": lambda x: torch.gather(x, 1, x.argmax(-1, keepdim=True)),
    "an embedding": lambda x: F.embedding(x.abs().long().clamp(0, 3), W),
    "sums of sums": lambda x: (x.sum(0).unsqueeze(0) * 2).sum(),
    "a sum seen twice": lambda x: (x.sum(0).view(2, 2), x.sum(0) * x.sum(0)),
    "the two largest": lambda x: torch.topk(x, 2, -1)[0],
    "the largest rows": lambda x: torch.topk(x, 1, 0)[0],
    "strides": lambda x: (x * 2).as_strided((x.shape[0], 2, 3), (4, 1, 1)),
    "any": lambda x: (x > 3).any(),
    "norm": lambda x: x / x.norm(),
    "counted": lambda x: (x > 0).sum() / x.shape[0],
    "einsum": lambda x: torch.einsum("ni,ij,nj->n", x, W[:, :4], x),
    "einsum of two": lambda x: torch.einsum("ni,nj->nij", x, x),
    "einsum over rows": lambda x: torch.einsum("ni,nj->ij", x, x),
    "attention": lambda x: F.scaled_dot_product_attention(
        x.view(-1, 2, 2), x.view(-1, 2, 2), x.view(-1, 2, 2)
    ),
}


NEEDS = {"one row": 3, "a part of the rows": 3, "a variance": 2}  # rows
SIZES = [8, 7, 2, 1]


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("count", SIZES)
def test_operations(name: str, count: int) -> None:
    if count < NEEDS.get(name, 1):
        pytest.skip("needs more rows")
    assert_same(OPERATIONS[name], normal(count, 4))


def assert_same_for_all(
    fn: Callable[..., Any], shape: Sequence[int], *others: Any, fewest: int = 2
) -> None:
    """One record gives what a function does, for any number of rows; one row is no such number."""
    batch = (True, *(False for _ in others))
    make = varying(fn, [normal(8, *shape), *others], batch)
    for count in SIZES:
        if count >= max(fewest, 2):
            given = normal(count, *shape), *others
            messages = assert_same(fn, *given, batch=batch, make=make)
            assert messages == assert_same(fn, *given, batch=batch)
        else:
            with pytest.raises(Refused, match="rows >"):
                make(Rows(count, 0, 0))


NUMBERS = {"rows unbound", "einsum"}  # which need the number of rows itself


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_for_all_sizes(name: str) -> None:
    if name in NUMBERS:
        with pytest.raises(Refused, match="needed as a number"):
            varying(OPERATIONS[name], [normal(8, 4)], (True,))
        return
    assert_same_for_all(OPERATIONS[name], [4], fewest=NEEDS.get(name, 2))


TWO: dict[str, Callable[[Any], Any]] = {
    "rows": lambda x: torch.tanh(x) * 2 - x.mean((0, 1)),
    "of each": lambda x: x - x.mean(1, keepdim=True),
    "of all": lambda x: (x / x.sum(1).norm()).mean(),
    "a matrix": lambda x: x @ W,
    "flat": lambda x: x.reshape(-1, 4) * 2,
    "flat rows": lambda x: x.reshape(x.shape[0], -1).sum(1),
    "split": lambda x: x.view(*x.shape[:2], 2, 2).transpose(1, 2).reshape(x.shape[0], 2, -1),
    "turned": lambda x: x.transpose(0, 1).reshape(x.shape[1], -1) + 1,
    "attention": lambda x: torch.softmax(x @ x.transpose(1, 2), -1) @ x,
    "a constant": lambda x: x + torch.arange(x.shape[1]).view(1, -1, 1),
    "wider": lambda x: x.mean(1, keepdim=True).expand(-1, x.shape[1], -1) - x,
    "sums": lambda x: torch.cumsum(x, 1) + torch.cumsum(x, 0),
}


@pytest.mark.parametrize("name", TWO)
def test_two_sizes_that_vary(name: str) -> None:
    make = varying(TWO[name], [normal(8, 6, 4)], (True,), [("rows", "time", None)])
    for count, time in ((8, 6), (6, 6), (7, 2), (2, 9)):
        assert_same(TWO[name], normal(count, time, 4), make=make)


@pytest.mark.parametrize("rows", [8, 1])
def test_rows_that_do_not_vary(rows: int) -> None:
    """Another size does."""
    make = varying(TWO["split"], [normal(rows, 6, 4)], (True,), [(None, "time", None)])
    for time in (6, 8, 2):
        assert_same(TWO["split"], normal(rows, time, 4), make=make)


def test_how_values_lie_in_memory_is_not_guessed() -> None:
    def turned(x: Any) -> Any:
        return (x * 2).t().as_strided((4,), (1,))

    with pytest.raises(ts.StrategyError, match=r"as_strided[\s\S]*to fix:"):
        exact(turned, [normal(6, 4)], (True,))(Rows(6, 0, 3))
    with pytest.raises(Refused, match="as_strided"):
        varying(turned, [normal(6, 4)], (True,))


def test_limits_on_rows_are_kept_to() -> None:
    def first(x: Any) -> Any:
        return x[: torch.sym_min(x.shape[0], 20_000)] * 2

    make = varying(first, [normal(8, 1)], (True,))
    for count in (8, 20_003):
        assert_same(first, normal(count, 1), make=make)


GRADIENTS: dict[str, Callable[..., Any]] = {
    "dense": lambda x, w: torch.tanh(x @ w).square().mean(),
    "batch norm": lambda x, w: (
        (((x @ w) - (x @ w).mean(0)) * torch.rsqrt((x @ w).var(0, correction=0) + 1e-3))
        .relu()
        .mean()
    ),
    "layer norm": lambda x, w: F.layer_norm(x @ w, [5]).square().sum() / x.shape[0],
    "softmax": lambda x, w: F.cross_entropy(x @ w, x.argmax(-1)),
    "regularized": lambda x, w: (x @ w).abs().mean() + 0.1 * w.square().sum(),
    "embedding": lambda x, w: F.embedding(x.abs().long().clamp(0, 3), w).square().mean(),
}


def with_gradients(name: str) -> Callable[..., Any]:
    def step(x: Any, w: Any) -> Any:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        loss = GRADIENTS[name](x, w)
        return [
            loss.detach(),
            *torch.autograd.grad(loss, [x, w], allow_unused=True, materialize_grads=True),
        ]

    return step


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("count", SIZES)
def test_gradients(name: str, count: int) -> None:
    assert_same(with_gradients(name), normal(count, 4), W, batch=(True, False))


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_for_all_sizes(name: str) -> None:
    assert_same_for_all(with_gradients(name), [4], W)


def images(x: Any, w: Any) -> Any:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    hidden = F.max_pool2d(F.conv2d(x, w, w[:, 0, 0, 0]), 2)
    loss = F.avg_pool2d(hidden, 2).square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, [x, w]), hidden.detach()]


KERNEL = normal(3, 2, 3, 3)


@pytest.mark.parametrize("count", SIZES)
def test_convolution_and_pooling(count: int) -> None:
    assert_same(images, normal(count, 2, 8, 8), KERNEL, batch=(True, False))


def test_convolution_and_pooling_for_all_sizes() -> None:
    assert_same_for_all(images, [2, 8, 8], KERNEL)


def test_gradients_are_sent_in_one_message() -> None:
    """And the loss with them: nothing needs it before."""

    def step(x: Any, a: Any, b: Any) -> Any:
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        loss = torch.tanh(torch.tanh(x @ a) @ b).square().mean()
        by_a, by_b = torch.autograd.grad(loss, [a, b])
        return [loss.detach(), a.detach() - 0.1 * by_a, b.detach() - 0.1 * by_b]

    given = normal(8, 4), W, normal(5, 2)
    assert assert_same(step, *given, batch=(True, False, False)) == 1


def test_views_of_what_is_updated_in_place() -> None:
    def of_rows(x: Any) -> Any:
        y = x * 1
        view = y.view(-1, 2, 2)
        y.mul_(2)
        return view

    def of_a_sum(x: Any) -> Any:
        y = x.sum(0)
        view = y.view(2, 2)
        y.mul_(2)
        return view

    assert_same(of_rows, normal(7, 4))
    with pytest.raises(ts.StrategyError, match=r"updated in place[\s\S]*mul_[\s\S]*to fix:"):
        exact(of_a_sum, [normal(6, 4)], (True,))(Rows(6, 0, 3))
    with pytest.raises(ts.StrategyError, match="updated in place"):
        varying(of_a_sum, [normal(6, 4)], (True,))(Rows(6, 0, 3))
