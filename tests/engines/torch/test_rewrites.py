"""Rewritten records of torch against the plain ones: the same numbers, and only where it is sure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("records of operations are torch's", allow_module_level=True)

import torch
from keras import layers
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import trainstep as ts
from trainstep._engines.torch.tricks.rewrites import rewritten, skip_pooling_copies

Function = Callable[..., Any]


def recorded(function: Function, *tensors: torch.Tensor) -> Any:
    """The graph of a function and of its gradient by the first tensor."""

    def both(first: torch.Tensor, *rest: torch.Tensor) -> Any:
        first = first.detach().requires_grad_()
        result = function(first, *rest)
        (slope,) = torch.autograd.grad(result.square().sum(), first)
        return result.detach().contiguous(), slope.contiguous()

    module = make_fx(both)(*tensors)
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def operations(module: Any) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def pooled(x: torch.Tensor, size: int = 2, stride: int = 2) -> torch.Tensor:
    """Max pooling as Keras does it with channels that come last."""
    first = (2 * x).permute(0, 3, 1, 2).contiguous()
    return functional.max_pool2d(first, size, stride).permute(0, 2, 3, 1) + 1


def images(filling: str = "normal", shape: tuple[int, ...] = (3, 7, 6, 5)) -> torch.Tensor:
    rng = np.random.default_rng(0)
    values = {
        "normal": rng.normal(size=shape),
        "ties": rng.integers(-1, 2, shape),
        "infinities": rng.choice([-np.inf, 0.0, np.inf], shape),
        "nan": np.where(rng.uniform(size=shape) < 0.1, np.nan, rng.normal(size=shape)),
    }
    return torch.from_numpy(values[filling].astype(np.float32))


def assert_same(module: Any, other: Any, *tensors: torch.Tensor) -> None:
    results = []
    for each in (module, other):
        torch.manual_seed(0)
        results.append(each(*tensors))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("size", "stride"), [(2, 2), (3, 2), (3, 1)])
@pytest.mark.parametrize("filling", ["normal", "ties", "infinities", "nan"])
def test_pooling_without_the_copy_gives_the_same_to_the_bit(
    filling: str, size: int, stride: int
) -> None:
    x = images(filling)
    plain = recorded(lambda x: pooled(x, size, stride), x)
    module = recorded(lambda x: pooled(x, size, stride), x)
    skip_pooling_copies(module.graph)
    module.recompile()
    copies = [operations(each).count("aten.clone.default") for each in (plain, module)]
    assert copies[1] == copies[0] - 1
    assert_same(plain, module, x)
    after = rewritten(module)
    assert "trainstep.max_pool.default" in operations(after)
    assert "trainstep.max_pool_gradient.default" in operations(after)
    assert_same(plain, after, x)


def test_the_record_itself_stays_as_it_was() -> None:
    module = recorded(pooled, images())
    skip_pooling_copies(module.graph)
    before = operations(module)
    rewritten(module)
    assert operations(module) == before


def flattened(x: torch.Tensor) -> torch.Tensor:
    """The order in memory matters: a view of what the copy makes possible."""
    return functional.max_pool2d(x.permute(0, 3, 1, 2).contiguous(), 2).view(len(x), -1)


def first_channels(x: torch.Tensor) -> torch.Tensor:
    return functional.max_pool2d(x, 2)


def copy_used_elsewhere(x: torch.Tensor) -> torch.Tensor:
    copy = x.permute(0, 3, 1, 2).contiguous()
    return functional.max_pool2d(copy, 2).permute(0, 2, 3, 1).sum() + copy.view(-1)


def changed_behind(x: torch.Tensor) -> torch.Tensor:
    doubled = 2 * x
    copy = doubled.permute(0, 3, 1, 2).contiguous()
    doubled.mul_(0)
    return functional.max_pool2d(copy, 2).permute(0, 2, 3, 1)


def turned_then_flattened(x: torch.Tensor) -> torch.Tensor:
    """Torch has recorded a view, which the copy makes possible, behind a permutation."""
    return torch.relu(pooled(x)).permute(0, 3, 1, 2).reshape(len(x), -1)


def pooled_again(x: torch.Tensor) -> torch.Tensor:
    """The second pooling has no copy of its own, and lies as the first does."""
    first = pooled(x, 2, 1).permute(0, 3, 1, 2)
    return functional.max_pool2d(first, 2).reshape(len(x), -1)


def flattened_behind_a_sum(x: torch.Tensor) -> torch.Tensor:
    """A view in the gradient."""
    wide = x.reshape(len(x), 5, 7, 6).permute(0, 2, 3, 1)
    return pooled(wide + x)


def places_flattened(x: torch.Tensor) -> torch.Tensor:
    first = x.permute(0, 3, 1, 2).contiguous()
    maxima, places = functional.max_pool2d(first, 2, return_indices=True)
    return maxima.permute(0, 2, 3, 1).sum((1, 2, 3)) + places.view(len(x), -1).sum(1)


def dropped_out(x: torch.Tensor) -> torch.Tensor:
    """Draws fill memory in its order."""
    return functional.dropout(pooled(x), 0.5)


@pytest.mark.parametrize(
    "function",
    [
        flattened,
        first_channels,
        copy_used_elsewhere,
        changed_behind,
        turned_then_flattened,
        pooled_again,
        flattened_behind_a_sum,
        places_flattened,
        dropped_out,
    ],
)
def test_pooling_is_left_alone_where_somebody_could_see_it(function: Function) -> None:
    x = images()
    plain, module = recorded(function, x), recorded(function, x)
    before = operations(module)
    skip_pooling_copies(module.graph)
    module.recompile()
    assert operations(module) == before
    assert_same(plain, rewritten(module), x)


KEPT = "prims.inductor_force_stride_order.default"


def normalized(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(0)) * (x.var(0) + 1e-3).rsqrt()


def test_what_many_read_is_computed_once() -> None:
    x = torch.randn(200, 3)
    plain = recorded(normalized, x)
    after = rewritten(plain)
    assert operations(plain).count(KEPT) == 0
    assert operations(after).count(KEPT) >= 2  # the mean, and the scale
    assert_same(plain, after, x)
    few = torch.randn(8, 3)
    assert KEPT not in operations(rewritten(recorded(normalized, few)))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_number_that_many_read_is_computed_once(shape: tuple[int, ...]) -> None:
    """Like the step size of Adam. Inductor by itself takes two powers for every few weights."""
    x, rate = torch.randn(40, 50), torch.full(shape, 0.9)
    plain = recorded(lambda x, rate: x * (1 - rate**2.5), x, rate)
    after = rewritten(plain)
    assert_same(plain, after, x, rate)

    def loop_with_the_power(module: Any) -> str:
        with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
            run, (text,) = run_and_get_code(torch._inductor.compile, module, [x, rate])
            torch.testing.assert_close(list(run(x, rate)), list(plain(x, rate)))
        (loop,) = (loop for loop in text.split("for(")[1:] if "pow(" in loop)
        return loop

    assert "x0<static_cast<int64_t>(2000L)" in loop_with_the_power(plain)
    assert "x0<static_cast<int64_t>(2L)" in loop_with_the_power(after)


def test_what_is_updated_in_place_is_left_alone() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        values = x.detach()
        scale = values.sum(0) * 2
        first = values * scale
        scale.add_(1)
        return x + first + values * scale

    x = torch.randn(200, 3)
    plain = recorded(function, x)
    after = rewritten(plain)
    assert KEPT not in operations(after)
    assert_same(plain, after, x)


@pytest.mark.slow
def test_a_convnet_trains_alike_compiled_and_replayed() -> None:
    """Within rounding: inductor sums in another order. SGD, so that it shows as it is."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 12, 12, 2)), rng.normal(size=(16, 3))

    def trained(optimize: str) -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                layers.Input((12, 12, 2)),
                layers.Conv2D(4, 3),
                layers.BatchNormalization(),
                layers.ReLU(),
                layers.MaxPooling2D(2),
                layers.MaxPooling2D(3, 2, padding="same"),
                layers.Permute((3, 1, 2)),
                layers.Flatten(),
                layers.Dense(3),
            ]
        )
        trainer = ts.Trainer(model, optimizer="sgd", loss="mse", optimize=optimize)
        for _ in range(3):
            trainer.train_on_batch(x, y)
        return model.get_weights()

    for replayed, compiled in zip(trained("trace"), trained("full"), strict=True):
        np.testing.assert_allclose(compiled, replayed, rtol=1e-5, atol=1e-6)
