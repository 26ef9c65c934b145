"""Cures for torch.compile: graphs that reach the backend, counted with and without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .cure import Cures, Runs

CURES = Cures()


def compiled(function: Callable[..., Any], runs: Runs, **options: Any) -> Callable[..., Any]:
    """`function` under torch.compile with a backend that counts graphs and runs them as they are.

    Programs are kept by the code of a function, so those of an earlier test are thrown away.
    """
    torch._dynamo.reset()

    def backend(graph: Any, inputs: Any) -> Any:
        runs()
        return graph.forward

    return torch.compile(function, backend=backend, **options)


@CURES.add("shape", before=2, after=1)
def mark_the_size_as_dynamic(cured: bool) -> int:
    runs = Runs()
    mean = compiled(lambda x: (2 * x).mean(), runs)
    for size in (8, 5, 3):
        x = torch.ones(size, 4)
        if cured:
            torch._dynamo.mark_dynamic(x, 0)
        mean(x)
    return runs.number


@CURES.add("shape", before=2, after=1)
def compile_with_dynamic_sizes(cured: bool) -> int:
    runs = Runs()
    mean = compiled(lambda x: (2 * x).mean(), runs, dynamic=True if cured else None)
    for size in (8, 5, 3):
        mean(torch.ones(size, 4))
    return runs.number


@CURES.add("dtype", before=2, after=1)
def cast_before_the_call(cured: bool) -> int:
    runs = Runs()
    total = compiled(lambda x: (x + 1).sum(), runs)
    for dtype in (torch.float32, torch.float64):
        x = torch.ones(4, dtype=dtype)
        total(x.float() if cured else x)
    return runs.number


@CURES.add("number", before=2, after=1)
def make_the_integer_a_tensor(cured: bool) -> int:
    runs = Runs()
    shifted = compiled(lambda x, by: x + by, runs)
    for by in (3, 4, 5):
        assert float(shifted(torch.ones(()), torch.tensor(by) if cured else by)) == 1 + by
    return runs.number


@CURES.add("number", before=2, after=1)
def make_the_float_a_tensor(cured: bool) -> int:
    runs = Runs()
    scaled = compiled(lambda x, by: x * by, runs)
    for by in (0.5, 0.25, 0.125):
        assert float(scaled(torch.ones(()), torch.tensor(by) if cured else by)) == by
    return runs.number


@CURES.add("static", before=2, after=1)
def choose_with_where_instead_of_a_flag(cured: bool) -> int:
    runs = Runs()

    def signed(x: Any, negative: Any) -> Any:
        if cured:
            return torch.where(negative, -x, x)
        return -x if negative else x + 0

    step = compiled(signed, runs)
    for flag in (True, False, True):
        value = step(torch.ones(()), torch.tensor(flag) if cured else flag)
        assert float(value) == (-1.0 if flag else 1.0)
    return runs.number


@CURES.add("structure", before=2, after=1)
def keep_to_tuples(cured: bool) -> int:
    runs = Runs()
    joined = compiled(lambda parts: torch.cat(parts) + 1, runs)
    for parts in ([torch.ones(2), torch.ones(2)], (torch.ones(2), torch.ones(2))):
        joined(tuple(parts) if cured else parts)
    return runs.number


@CURES.add("structure", before=2, after=1)
def pass_a_neutral_value_instead_of_none(cured: bool) -> int:
    runs = Runs()
    loss_of = compiled(lambda e, w=None: e.mean() if w is None else (e * w).mean(), runs)
    for weight in (None, torch.ones(3)):
        loss_of(torch.ones(3), torch.ones(3) if cured else weight)
    return runs.number


@CURES.add("capture", before=2, after=1)
def pass_what_changes_as_a_tensor(cured: bool) -> int:
    runs = Runs()
    scale = 1.0

    def scaled(x: Any, by: Any) -> Any:
        return x * (by if cured else scale)

    step = compiled(scaled, runs)
    for value in (1.0, 2.0, 3.0):
        scale = value
        assert float(step(torch.ones(()), torch.tensor(value))) == value
    return runs.number


@CURES.add("item", before=3, after=1)
def keep_the_value_a_tensor(cured: bool) -> int:
    runs = Runs()

    def scaled(x: Any) -> Any:
        total = (x * 2).sum()
        return x * (total if cured else total.item())

    step = compiled(scaled, runs)
    for scale in (0.5, 1.5, 2.5):
        step(scale * torch.ones(3))
    return runs.number


@CURES.add("graph-breaks", before=2, after=1)
def print_outside(cured: bool) -> int:
    runs = Runs()

    def activated(x: Any) -> Any:
        y = torch.tanh(x)
        if not cured:
            print("activated")
        return y * 2

    step = compiled(activated, runs)
    for _ in range(2):
        step(torch.ones(3))
        if cured:
            print("activated")
    return runs.number


@CURES.add("graph-breaks", before=2, after=1)
def choose_with_where_instead_of_if(cured: bool) -> int:
    runs = Runs()

    def shifted(x: Any) -> Any:
        y = x * 2
        if cured:
            return torch.where(y.sum() > 0, y + 1, y - 1)
        return y + 1 if y.sum() > 0 else y - 1

    step = compiled(shifted, runs)
    for _ in range(2):
        assert float(step(torch.ones(()))) == 3.0
    return runs.number


@CURES.add("recompile-limit", before=8, after=1)
def pass_a_tensor_instead_of_many_values(cured: bool) -> int:
    runs = Runs()
    named = compiled(lambda x, name: x + (name if cured else len(name)), runs)
    for turn in range(10):
        value = torch.tensor(turn) if cured else "x" * turn
        assert float(named(torch.ones(()), value)) == 1 + turn
    return runs.number


@CURES.add("context", before=2, after=1)
def enter_autocast_at_every_call(cured: bool) -> int:
    runs = Runs()
    product = compiled(lambda a: a @ a, runs)
    for enabled in (cured, True, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            product(torch.ones(3, 3))
    return runs.number


@CURES.add("eager", before=5, after=1)
def compile_the_forward_pass(cured: bool) -> int:
    """How often the model's Python runs in five steps."""
    runs, ran = Runs(), Runs()
    weights = torch.ones(3, requires_grad=True)

    def loss_of() -> Any:
        return (weights**2).sum()

    def by_hand() -> Any:
        ran()
        return loss_of()

    step = compiled(loss_of, runs) if cured else by_hand
    for _ in range(5):
        step().backward()
        with torch.no_grad():
            weights -= 0.25 * weights.grad
        weights.grad = None
    torch.testing.assert_close(weights.detach(), 0.5**5 * torch.ones(3))
    return runs.number + ran.number
