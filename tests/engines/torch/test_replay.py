"""torch's replay against the record that it comes from: the same numbers to the bit, and safe."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("records of operations are torch's", allow_module_level=True)

import torch
from keras import layers
from torch.fx.experimental.proxy_tensor import make_fx

import trainstep as ts
from trainstep._engines.torch import state
from trainstep._engines.torch.tricks import torchscript_replay
from trainstep._engines.torch.tricks.lean_graph import lean
from trainstep._engines.torch.tricks.torchscript_replay import Replay

Function = Callable[..., Any]


def operations(module: Any) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def assert_equal(got: Any, expected: Any) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def both_ways(function: Function, *tensors: torch.Tensor) -> Any:
    """The leaner record of a function; it, and its replay, give the same as the function."""
    expected = function(*[x.clone() for x in tensors])
    module = make_fx(function)(*[x.clone() for x in tensors])
    result, run = lean(module), Replay(module)
    for _ in range(2):  # what is kept from one call to the next stays as it is
        assert_equal(result(*tensors), expected)
        for output in (got := run(*tensors)):
            assert all(output.data_ptr() != x.data_ptr() for x in tensors)
        assert_equal(got, expected)
        assert len({x.untyped_storage().data_ptr() for x in got}) == len(got)
        for x in got:
            x.fill_(77)  # it is the caller's
    return result


# Records ------------------------------------------------------------------------------------


def test_what_is_the_same_at_each_step_is_computed_once() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        size = torch.tensor(x.shape).prod().float()
        return [x.sum() / torch.where(size == 0, torch.ones_like(size), size)]

    after = both_ways(function, torch.randn(4, 3))
    assert operations(after) == ["aten.sum.default", "aten.div.Tensor"]


def test_a_constant_that_leaves_is_new_at_each_step() -> None:
    both_ways(lambda x: [torch.zeros(3), torch.tensor([1.0, 2.0]), x + 1], torch.randn(3))
    both_ways(lambda x: [torch.zeros(6).view(2, 3), torch.ones(2)[0].clone()], torch.randn(3))


def test_a_large_constant_is_made_at_each_step() -> None:
    after = both_ways(lambda x: [x + torch.zeros(100, 100)], torch.randn(100, 100))
    assert "aten.zeros.default" in operations(after)


def test_what_is_there_already_is_not_computed_again() -> None:
    after = both_ways(lambda x: [(x - 1).abs() + (x - 1).exp()], torch.randn(5))
    assert operations(after).count("aten.sub.Tensor") == 1


def test_equal_numbers_of_other_types_are_not_the_same() -> None:
    after = both_ways(lambda x: [(x + 1).float(), (x + 1.0)], torch.arange(5))
    assert operations(after).count("aten.add.Tensor") == 2


def test_an_operation_of_somebody_else_runs_at_each_step() -> None:
    calls = []

    @torch.library.custom_op("trainstep_tests::noted", mutates_args=())
    def noted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.clone()

    noted.register_fake(torch.empty_like)
    run = Replay(
        make_fx(lambda x: [x + noted(torch.ones(2)) + noted(torch.ones(2))])(torch.ones(2))
    )
    calls.clear()
    for _ in range(3):
        assert_equal(run(torch.ones(2)), [torch.full((2,), 3.0)])
    assert len(calls) == 6
    calls.clear()
    for _ in range(300):  # also when nobody reads what it gives
        run.unread(torch.ones(2))
    assert len(calls) == 600


def test_random_numbers_are_drawn_as_often() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        torch.rand(3)  # nobody reads it, and yet the next ones are others
        return [x + torch.rand(3), x + torch.rand(3)]

    x = torch.zeros(3)
    run = Replay(make_fx(function)(x))
    torch.manual_seed(3)
    expected = [function(x) for _ in range(2)]
    torch.manual_seed(3)
    for each in expected:
        assert_equal(run(x), each)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [(x - 1), (x - 1)],
        lambda x: [(x - 1).view(6), (x - 1).clone()],
        lambda x: [x.clone(), x.clone().view(6)],
        lambda x: [(y := x * 2).clone(), y],
        lambda x: [(y := x * 2).clone(), y.clone()],
        lambda x: [(y := x * 2).view(6).clone(), y],
        lambda x: [torch.where(torch.tensor(True), x, x * 2).view(6).clone()],
        lambda x: [(x**1.0).view(3, 2), x.t().contiguous(), x.t().contiguous().view(6)],
        lambda x: [part.clone() for part in (x * 2).split(1)],
        lambda x: [x.expand(2, 2, 3).clone()],
        lambda x: [torch.sort(x)[0], torch.sort(x)[0]],
        lambda x: [*torch._foreach_mul([x], 2.0), *torch._foreach_mul([x], 2.0)],
        lambda x: [x.expand(2, 2, 3) @ x.t(), x.expand(2, 2, 3) @ x.t()],
        lambda x: [torch.ones(2, 3, 4) @ torch.ones(4, 5), x + 1],
    ],
)
def test_what_leaves_shares_no_memory(function: Function) -> None:
    both_ways(function, torch.randn(2, 3))


def test_a_quotient_that_is_not_used_may_divide_by_zero() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        zero = y == 0
        safe = torch.where(zero, torch.ones_like(y), y)
        return [torch.where(zero, torch.zeros_like(y), x / safe)]

    x = torch.tensor([1.0, 0.0, float("nan"), float("inf"), -2.0])
    y = torch.tensor([0.0, 0.0, 0.0, 0.0, 3.0])
    after = both_ways(function, x, y)
    assert operations(after).count("aten.where.self") == 1


def test_a_quotient_that_is_used_elsewhere_is_left_alone() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        zero = y == 0
        quotient = x / torch.where(zero, torch.ones_like(y), y)
        return [torch.where(zero, torch.zeros_like(y), quotient), quotient]

    both_ways(function, torch.tensor([1.0, 2.0]), torch.tensor([0.0, 2.0]))


def test_a_quotient_that_is_chosen_either_way_is_left_alone() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        zero = y == 0
        quotient = x / torch.where(zero, torch.ones_like(y), y)
        return [torch.where(zero, quotient, quotient)]

    both_ways(function, torch.tensor([1.0, 2.0]), torch.tensor([0.0, 2.0]))


def test_lists_are_updated_in_place_where_nobody_else_reads_them() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        scaled = torch._foreach_mul([x, y], 0.9)
        moved = torch._foreach_add(scaled, [y, x], alpha=2)
        return [*torch._foreach_div(moved, torch._foreach_add([x, y], 10.0))]

    after = both_ways(function, torch.rand(3), torch.rand(3))
    assert operations(after).count("aten._foreach_add_.List") == 1
    assert operations(after).count("aten._foreach_div_.List") == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: [*(a := torch._foreach_mul([x, y], 2.0)), *torch._foreach_add(a, 1.0)],
        lambda x, y: [*torch._foreach_mul(a := torch._foreach_add([x, y], 1.0), a)],
        lambda x, y: [*torch._foreach_add(torch._foreach_add([x, y], 1.0)[:1] * 2, 1.0)],
        lambda x, y: [*torch._foreach_add(torch._foreach_mul([x.int(), y.int()], 2), 0.5)],
        lambda x, y: [
            *torch._foreach_add(a := torch._foreach_add([x, y], 1.0), 1.0),
            a[0].view(3) * 2,
        ],
    ],
)
def test_lists_that_somebody_else_reads_are_left_alone(function: Function) -> None:
    both_ways(lambda x, y: [each.clone() for each in function(x, y)], torch.rand(3), torch.rand(3))


def on_a_view(x: torch.Tensor) -> list[torch.Tensor]:
    y = x.clone()
    first = y * 2
    y[0].add_(1)
    y.view(6)[3:].mul_(first.sum())
    return [y, first, y * 2]


def on_one_of_several(x: torch.Tensor) -> list[torch.Tensor]:
    p = torch.sort(x)[0]
    p.add_(1)
    return [p * 1, torch.sort(x)[0] * 1]


def twice_in_a_list(x: torch.Tensor) -> list[torch.Tensor]:
    y = x.clone()
    torch._foreach_add_([y, y], 1.0)
    return [y]


def crossed(x: torch.Tensor) -> list[torch.Tensor]:
    y, z = x.clone(), x * 2
    torch._foreach_add_([y, z], [z, y])
    return [y, z]


def by_a_part_of_itself(x: torch.Tensor) -> list[torch.Tensor]:
    y, z = x.sum(), x.clone()
    torch._foreach_mul_([y, z], y)
    return [y, z]


def by_a_wider_type(x: torch.Tensor) -> list[torch.Tensor]:
    y = x.sum()
    torch._foreach_mul_([y], torch.tensor(2.5, dtype=torch.float64))
    return [y]


def in_half_precision(x: torch.Tensor) -> list[torch.Tensor]:
    y, z = x.bfloat16(), x.half()
    torch._foreach_mul_([y], 0.9)
    torch._foreach_mul_([z], 0.9)
    return [y, z, *torch._foreach_mul(torch._foreach_add([x.bfloat16()], 1.0), 0.9)]


def with_a_view_from_before(x: torch.Tensor) -> list[torch.Tensor]:
    y = x.clone()
    view = y.view(6)
    y = y.add_(1)
    torch._foreach_mul_([y], 2.0)
    return [view * 1, y]


def read_by_an_update(x: torch.Tensor) -> list[torch.Tensor]:
    y = x.clone()
    view = y.view(-1)
    first = torch._foreach_mul([x, x + 1], 2.0)
    second = torch._foreach_add(first, 1.0)
    torch._foreach_add_([y], [first[0]])
    return [*second, view * 1]


def statistics(x: torch.Tensor) -> list[torch.Tensor]:
    mean, spread = x.mean(0) * 1.0, x.mean(0).abs()
    out = torch.nn.functional.batch_norm(x, mean, spread, training=True)
    return [out * 1, mean * 2, (x.mean(0) * 1.0) * 2]


@pytest.mark.parametrize(
    "function",
    [
        on_a_view,
        on_one_of_several,
        twice_in_a_list,
        crossed,
        by_a_part_of_itself,
        by_a_wider_type,
        in_half_precision,
        with_a_view_from_before,
        read_by_an_update,
        statistics,
    ],
)
def test_what_is_updated_in_place_gives_the_same(function: Function) -> None:
    both_ways(function, torch.randn(2, 3))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [torch.sum(x, dim=[])],
        lambda x: [x // 2, x.clone().add_(1).mul_(3), torch.div(x, 2, rounding_mode="trunc")],
        lambda x: [
            x[None, [0, 1], :],
            torch.ops.aten.index_put(x, [None, torch.tensor([1])], x.sum()),
        ],
        lambda x: [torch.zeros(2, dtype=torch.int64, device="cpu") + x[:, 0]],
        lambda x: [torch.nn.functional.interpolate(x[None, None], scale_factor=[2, 3.0])],
        lambda x: list(torch.nn.functional.max_pool2d(x[None], 2, return_indices=True)),
    ],
)
def test_torchscript_takes_arguments_of_any_kind(function: Function) -> None:
    x = torch.randn(2, 3)
    both_ways(function, x)
    module = lean(make_fx(function)(x))
    assert_equal(torchscript_replay.scripted(module)(x), module(x))  # it does not refuse


def test_what_would_be_left_out_is_refused() -> None:
    module = make_fx(lambda x: [torch.ops.aten.expand(x, [4, 2, 3], implicit=True).clone()])(
        torch.randn(2, 3)
    )
    with pytest.raises(NotImplementedError, match="`implicit` would be removed"):
        torchscript_replay.scripted(module)


# Steps --------------------------------------------------------------------------------------


def images() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(3, 3),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dropout(0.4),
            layers.Dense(2),
        ]
    )


def words() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((5,), dtype="int32"),
            layers.Embedding(7, 4, mask_zero=True),
            layers.GlobalAveragePooling1D(),
            layers.GaussianNoise(0.1),
            layers.Dense(2, kernel_regularizer="l2"),
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "optimizer", "policy"),
    [
        (images, "adam", "float32"),
        (images, "sgd", "float32"),
        (words, "adam", "float32"),
        (words, "rmsprop", "float32"),
        (words, "adagrad", "float32"),
        (words, "adam", "mixed_bfloat16"),
        (words, "adam", "bfloat16"),
    ],
)
def test_a_replay_trains_like_its_record(
    build: Callable[[], keras.Model],
    optimizer: str,
    policy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 8, 8, 1)) if build is images else rng.integers(0, 7, (6, 5))
    y = rng.integers(0, 2, (6, 1))

    def trained() -> tuple[list[np.ndarray], list[float]]:
        keras.utils.set_random_seed(0)
        keras.config.set_dtype_policy(policy)
        model = build()
        keras.config.set_dtype_policy("float32")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainer = ts.Trainer(model, optimizer, loss, metrics=["accuracy"], clip_norm=1.0)
        logs = [float(trainer.train_on_batch(x, y)[name]) for name in ("loss", "accuracy") * 2]
        history = trainer.fit(x, y, epochs=2, batch_size=3, progress=False).history
        return model.get_weights(), [*logs, *history["loss"], *history["accuracy"]]

    weights, logs = trained()
    monkeypatch.setenv("TRAINSTEP_TRICKS", "lean_graph,torchscript_replay")
    expected_weights, expected_logs = trained()
    assert logs == expected_logs
    for got, expected in zip(weights, expected_weights, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_torchscript_runs_it() -> None:
    """And not Python, as it would if TorchScript refused."""
    seen = []
    script = torchscript_replay.scripted

    def watched(*args: Any) -> Any:
        seen.append(script(*args))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchscript_replay, "scripted", watched)
        trainer = ts.Trainer(images(), "adam", "mse")
        x, y = np.ones((4, 8, 8, 1)), np.ones((4, 2))
        trainer.train_on_batch(x, y)
        trainer.fit(x, y, progress=False)
    assert len(seen) == 2  # metrics of one batch, and over an epoch
    assert trainer.trace_count == 1


def test_what_torchscript_refuses_is_replayed_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("an operation that is not known")

    monkeypatch.setattr(torchscript_replay, "scripted", refuse)
    step = ts.function(lambda x: x * 2)
    np.testing.assert_array_equal(step(np.ones(3, "float32")), [2, 2, 2])
    np.testing.assert_array_equal(step(np.ones(3, "float32")), [2, 2, 2])


def test_a_signal_before_new_values_are_swapped_in_leaves_the_old_ones() -> None:
    script = torchscript_replay.scripted
    count = keras.Variable(0.0)

    class Late(RuntimeError):
        pass

    def late(*args: Any) -> Any:
        run = script(*args)

        def interrupted(*inputs: Any) -> Any:
            results = run(*inputs)
            if is_late:
                raise Late  # as the handler of a signal would
            return results

        return interrupted

    is_late = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchscript_replay, "scripted", late)
        step = ts.function(lambda x: count.assign_add(x))
        for _ in range(2):
            step(np.float32(1))
        is_late = True
        with pytest.raises(Late):
            step(np.float32(1))
        assert float(count.value) == 2.0
        is_late = False
        step(np.float32(1))
    assert float(count.value) == 3.0


def test_an_error_is_the_one_that_python_gives() -> None:
    table = keras.Variable(np.zeros((3, 2), "float32"))
    count = keras.Variable(0.0)

    @ts.function
    def step(rows: Any) -> Any:
        count.assign_add(1)
        return keras.ops.sum(torch.nn.functional.embedding(rows, table.value))

    step(np.array([0, 1]))
    with pytest.raises(IndexError, match="index out of range") as caught:
        step(np.array([0, 5]))
    assert "TorchScript" not in str(caught.value)
    assert float(count.value) == 1
    step(np.array([2, 2]))
    assert float(count.value) == 2


def test_an_error_draws_no_more_random_numbers_than_python() -> None:
    def function(x: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
        return [torch.rand(3) + x, torch.nn.functional.embedding(rows, x.view(3, 1))]

    x, bad = torch.zeros(3), torch.tensor([5])
    module = make_fx(function)(x, torch.tensor([0]))
    states = []
    for run in (module.forward, Replay(module)):
        torch.manual_seed(0)
        with pytest.raises(IndexError):
            run(x, bad)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_the_switch_for_its_optimizer_is_put_back() -> None:
    step = ts.function(lambda x: x * 2)
    for optimized in (True, False):
        torch._C._set_graph_executor_optimize(optimized)
        try:
            step(np.ones(3, "float32"))
            step(np.ones(3, "float32"))
            assert torch._C._get_graph_executor_optimize() is optimized
        finally:
            torch._C._set_graph_executor_optimize(True)


def test_a_bool_may_change_between_calls() -> None:
    doubles, twice = (keras.Variable(False, dtype="bool", trainable=False) for _ in range(2))

    @ts.function
    def step(x: Any) -> Any:
        x = keras.ops.where(doubles.value, 2 * x, x)
        return keras.ops.where(twice.value, 2 * x, x)

    x = np.ones(2, "float32")
    for first, second in [(False, False), (True, False), (True, True), (False, True)] * 2:
        doubles.assign(first)
        twice.assign(second)
        np.testing.assert_array_equal(step(x), x * (1 + first) * (1 + second))
    assert step.trace_count == 1


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_bool_with_axes_keeps_them(shape: tuple[int, ...]) -> None:
    on = keras.Variable(np.zeros(shape, bool), trainable=False)
    step = ts.function(lambda x: keras.ops.cast(on.value, "float32") * keras.ops.sum(x))
    for value in (False, True):
        on.assign(np.full(shape, value))
        assert np.array_equal(step(np.ones(2, "float32")), np.full(shape, 2.0 * value))


def test_a_bool_that_the_step_sets_is_no_switch() -> None:
    odd = keras.Variable(False, dtype="bool", trainable=False)

    @ts.function
    def step(x: Any) -> Any:
        result = keras.ops.where(odd.value, -x, x)
        odd.assign(keras.ops.logical_not(odd.value))
        return result

    x = np.ones(2, "float32")
    for sign in (1, -1, 1, -1):
        np.testing.assert_array_equal(step(x), sign * x)


def test_new_values_are_swapped_in_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchScript lets other threads run: one that reads a parameter meanwhile may crash."""
    swaps: list[int] = []

    def swap_in(parameters: Any, values: Any) -> None:
        swaps.append(len(parameters := list(parameters)))
        state.swap_in(parameters, values)

    monkeypatch.setattr(torchscript_replay, "swap_in", swap_in)
    first, second = keras.Variable(1.0), keras.Variable(2.0)

    @ts.function
    def step(x: Any) -> Any:
        first.assign_add(x)
        second.assign(first * 2.0)
        return first.value

    for _ in range(3):
        step(np.float32(1.0))
    assert swaps == [2, 2, 2]
    assert (float(first.value), float(second.value)) == (4.0, 8.0)


def test_texts_of_records_are_not_kept() -> None:
    model = keras.Sequential([layers.Input((4,)), layers.Dense(8, "relu"), layers.Dense(1)])
    trainer = ts.Trainer(model, optimizer="adam", loss="mse")
    x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
    loader = torch.fx.graph_module._loader
    texts, lines = set(loader.eval_cache), set(linecache.cache)
    made = loader.next_id

    trainer.train_on_batch(x, y)
    trainer.fit(x, y, batch_size=1, epochs=40, progress=False)  # also one without outputs

    assert loader.next_id > made
    assert set(loader.eval_cache) == texts
    assert not [name for name in linecache.cache.keys() - lines if name.startswith("<eval_with")]


def test_texts_of_graphs_of_others_are_kept() -> None:
    made = []

    def step(x: Any) -> Any:
        if not made:
            graph = torch.fx.Graph()
            graph.output(graph.placeholder("x"))
            made.append(torch.fx.GraphModule(torch.nn.Module(), graph))
        return x + 1

    ts.function(step)(np.ones(3, "float32"))

    assert "return x" in inspect.getsource(made[0].forward)
