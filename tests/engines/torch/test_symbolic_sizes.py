"""torch: a step that is recorded once for sizes that vary, against a trace at each size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import trainstep as ts
from tests.helpers import Counted, host, normal, values_of
from trainstep._common import user_code
from trainstep._engines import Options, Refused, Traced
from trainstep._state.control_flow import traced_control_flow
from trainstep._state.scopes import Recorder, deferred_constants

if keras.backend.backend() != "torch":
    pytest.skip("an engine of torch's", allow_module_level=True)

import torch

from trainstep._engines.torch.engine import TorchEngine
from trainstep._engines.torch.trace_guard import TensorValueNeeded

B = ("b", None)
SIZES = (2, 3, 8, 17, 64)


def record(step: Callable[..., Any], arrays: Sequence[Any], axes: Any = None) -> Traced:
    """What the engine makes of a step, as the compiler asks it to."""
    engine = TorchEngine()
    with traced_control_flow(by_value=True), deferred_constants():
        return engine.trace(
            lambda tensors: list(step(*tensors)),
            arrays,
            Recorder(engine.current_graph),
            Options(),
            axes,
        )


def ran(traced: Traced, arrays: Sequence[Any]) -> list[np.ndarray]:
    """The outputs and the values written, by a run that is then undone."""
    before = values_of(traced.writes)
    outputs = traced.build("graph")(arrays)
    results = [host(x) for x in outputs] + values_of(traced.writes)
    for variable, value in zip(traced.writes, before, strict=True):
        variable.assign(value)
    return results


def assert_alike(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    """Equal to 1e-5 of the largest: sums are taken in another order."""
    assert len(got) == len(wanted)
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert a.shape == b.shape, i
        assert a.dtype == b.dtype, i
        largest = np.max(np.abs(b), initial=0.0)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * largest + 1e-12, err_msg=str(i))


@dataclass
class Case:
    """A step, the arrays of a call, and which of their sizes vary."""

    step: Callable[..., Any]
    arrays: Callable[..., list[Any]]
    axes: Any
    sizes: Sequence[tuple[int, ...]] = tuple((n,) for n in SIZES)


def trained(
    model: Any, loss_of: Callable[..., Any], optimizer: Any = None, metrics: Sequence[Any] = ()
) -> Callable[..., Any]:
    """A training step that returns loss, predictions and gradients."""
    optimizer = optimizer or keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    def step(*data: Any) -> list[Any]:
        *x, y = data

        def loss() -> Any:
            predicted = model(x if len(x) > 1 else x[0], training=True)
            return loss_of(y, predicted), predicted

        (value, predicted), gradients = ts.value_and_grad(
            loss, model.trainable_variables, has_aux=True
        )()
        optimizer.apply(gradients, model.trainable_variables)
        for metric in metrics:
            metric.update_state(y, predicted)
        return [value, predicted, *gradients]

    return step


def labels(n: int, classes: int = 3) -> np.ndarray:
    return np.random.default_rng(n).integers(0, classes, n)


def sparse() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp() -> Case:
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(16, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.3, seed=1),
            layers.Dense(3),
        ]
    )
    metrics = [
        keras.metrics.SparseCategoricalAccuracy(),
        keras.metrics.SparseTopKCategoricalAccuracy(2),
        keras.metrics.SparseCategoricalCrossentropy(from_logits=True),
    ]
    step = trained(model, sparse(), keras.optimizers.Adam(0.01), metrics)
    return Case(step, lambda n: [normal(n, 4), labels(n)], (B, ("b",)))


def weighted() -> Case:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    loss = keras.losses.MeanSquaredError()
    mean = keras.metrics.MeanSquaredError()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True)
    optimizer.build(model.trainable_variables)

    def step(x: Any, y: Any, weights: Any) -> list[Any]:
        value, gradients = ts.value_and_grad(
            lambda: loss(y, model(x), sample_weight=weights), model.trainable_variables
        )()
        optimizer.apply(gradients, model.trainable_variables)
        mean.update_state(y, model(x), sample_weight=weights)
        return [value, *gradients, mean.result()]

    return Case(
        step,
        lambda n: [normal(n, 4), normal(n, 1, seed=1), np.abs(normal(n, seed=2))],
        (B, B, ("b",)),
    )


def compiled_model() -> Case:
    """Keras's own losses and metrics, as a trainer calls them."""
    model = keras.Sequential([keras.Input((4,)), layers.Dense(8, "tanh"), layers.Dense(1)])
    model.compile(
        "rmsprop", "binary_crossentropy", metrics=["accuracy", keras.metrics.MeanAbsoluteError()]
    )
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)

    def step(x: Any, y: Any) -> list[Any]:
        def loss() -> Any:
            predicted = ops.sigmoid(model(x, training=True))
            return model.compute_loss(x, y, predicted), predicted

        (value, predicted), gradients = ts.value_and_grad(
            loss, model.trainable_variables, has_aux=True
        )()
        optimizer.apply(gradients, model.trainable_variables)
        logs = model.compute_metrics(x, y, predicted)
        return [value, *gradients, *logs.values()]

    case = Case(step, lambda n: [normal(n, 4), (labels(n, 2) * 1.0)[:, None]], (B, B))
    step(*map(ops.convert_to_tensor, case.arrays(4)))  # makes its metrics
    return case


def conv() -> Case:
    model = keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            layers.Conv2D(8, 3, padding="same", activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            layers.SpatialDropout2D(0.2, seed=3),
            layers.Conv2D(8, 3, strides=2, padding="same", activation="gelu"),
            layers.DepthwiseConv2D(3),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]
    )
    axes = (("b", None, None, None), ("b",))
    return Case(trained(model, sparse()), lambda n: [normal(n, 16, 16, 3), labels(n)], axes)


def flattened() -> Case:
    model = keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.Conv2DTranspose(4, 3, strides=2, padding="same"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.LayerNormalization(),
            layers.Dense(3),
        ]
    )
    axes = (("b", None, None, None), ("b",))
    return Case(trained(model, sparse()), lambda n: [normal(n, 8, 8, 2), labels(n)], axes)


def lstm() -> Case:
    model = keras.Sequential(
        [keras.Input((6, 4)), layers.LSTM(8, return_sequences=True), layers.GRU(5), layers.Dense(3)]
    )
    axes = (("b", None, None), ("b",))
    return Case(trained(model, sparse()), lambda n: [normal(n, 6, 4), labels(n)], axes)


def attention() -> Case:
    """Sizes of two axes vary."""
    tokens = keras.Input((None,), dtype="int32")
    x = layers.Embedding(11, 8)(tokens)
    attended = layers.MultiHeadAttention(2, 4, dropout=0.1, seed=5)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(x + attended)
    x = layers.Dense(8, activation="gelu")(x)
    model = keras.Model(tokens, layers.Dense(11)(x))
    step = trained(model, sparse(), keras.optimizers.AdamW(0.01))

    def arrays(n: int, t: int) -> list[Any]:
        rng = np.random.default_rng(n)
        return [rng.integers(0, 11, (n, t)), rng.integers(0, 11, (n, t))]

    sizes = [(2, 3), (4, 7), (9, 16), (16, 16), (5, 40)]
    return Case(step, arrays, (("b", "t"), ("b", "t")), sizes)


def pooled_over_time() -> Case:
    model = keras.Sequential(
        [
            keras.Input((None, 4)),
            layers.Conv1D(6, 3, padding="causal", activation="relu"),
            layers.MaxPooling1D(2),
            layers.Conv1D(6, 3),
            layers.GlobalMaxPooling1D(),
            layers.Dense(3),
        ]
    )
    axes = (("b", "t", None), ("b",))
    sizes = [(4, 8), (9, 16), (16, 17), (5, 40)]
    return Case(trained(model, sparse()), lambda n, t: [normal(n, t, 4), labels(n)], axes, sizes)


def own_mean() -> Case:
    """A loss that divides by sizes, as numbers and as tensors."""
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])

    def loss(y: Any, predicted: Any) -> Any:
        squares = ops.sum((y - predicted) ** 2)
        n = ops.shape(predicted)[0]
        return (
            squares / n
            + squares / ops.cast(n, "float32")
            + ops.mean(ops.convert_to_tensor([n, 2], "float32"))
            + ops.sum(predicted) / (n * 0.5)
            + ops.sum(predicted) / ops.sqrt(ops.convert_to_tensor(n))
        )

    return Case(trained(model, loss), lambda n: [normal(n, 4), normal(n, 2, seed=1)], (B, B))


def info_nce() -> Case:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(8), layers.UnitNormalization()])

    def loss(y: Any, predicted: Any) -> Any:
        logits = ops.matmul(predicted, ops.transpose(model(y)))
        wanted = ops.arange(ops.shape(predicted)[0])
        own = ops.eye(ops.shape(predicted)[0])
        return ops.mean(
            ops.sparse_categorical_crossentropy(wanted, logits / 0.1, from_logits=True)
        ) + 0.1 * ops.sum(own * logits)

    return Case(trained(model, loss), lambda n: [normal(n, 4), normal(n, 4, seed=1)], (B, B))


def two_inputs() -> Case:
    """Of three arrays, two share a size."""
    left, right = keras.Input((4,)), keras.Input((3,))
    joined = layers.Concatenate()([layers.Dense(5)(left), layers.Dense(5)(right)])
    model = keras.Model([left, right], layers.Dense(1)(joined))
    step = trained(model, keras.losses.Huber(), keras.optimizers.SGD(0.1, momentum=0.9))

    def arrays(n: int) -> list[Any]:
        return [normal(n, 4), normal(n, 3, seed=1), normal(n, 1, seed=2)]

    return Case(step, arrays, (B, B, B))


def vae() -> Case:
    seed = keras.random.SeedGenerator(7)
    inputs = keras.Input((6,))
    encoder = keras.Model(inputs, [layers.Dense(2)(inputs), layers.Dense(2)(inputs)])
    decoder = keras.Sequential([keras.Input((2,)), layers.Dense(6), layers.GaussianNoise(0.1)])
    variables = encoder.trainable_variables + decoder.trainable_variables
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(variables)

    def step(x: Any) -> list[Any]:
        def loss() -> Any:
            mean, log_variance = encoder(x)
            noise = keras.random.normal(ops.shape(mean), seed=seed)
            again = decoder(mean + ops.exp(0.5 * log_variance) * noise, training=True)
            divergence = ops.mean(1 + log_variance - mean**2 - ops.exp(log_variance))
            return ops.mean((x - again) ** 2) - 0.5 * divergence

        value, gradients = ts.value_and_grad(loss, variables)()
        optimizer.apply(gradients, variables)
        return [value, *gradients]

    return Case(step, lambda n: [normal(n, 6)], (B,))


def own_gradient() -> Case:
    """torch's own functions, which know nothing of Keras's types."""
    w = keras.Variable(normal(4))

    def step(x: Any) -> list[Any]:
        count = torch.tensor([x.shape[0], 1]).sum()
        loss = ((x @ w.value) ** 2).sum() / torch.as_tensor(x.shape[0])
        (gradient,) = torch.autograd.grad(loss, [w.value])
        w.assign(w - 0.1 * gradient)
        return [loss.detach(), count, x + torch.arange(x.shape[0])[:, None]]

    return Case(step, lambda n: [normal(n, 4)], (B,))


def in_place_and_constants() -> Case:
    """Updates in place, of the input too; branches that assign; arrays from outside of the step."""
    w, count = keras.Variable(normal(4)), keras.Variable(0, dtype="int32", trainable=False)
    tensor, array = torch.ones(4) * 3, np.arange(4, dtype="float32")

    def step(x: Any) -> list[Any]:
        x.add_(tensor)
        w.value.detach().mul_(0.5)
        ops.cond(
            ops.sum(x) > 30.0, lambda: count.assign(count + 1), lambda: count.assign(count - 1)
        )
        rows = ops.multiply(x[1:], array)
        rows[:1] = 0.0
        return [x, rows, x.T, w * 1.0, ops.sum(x[: x.shape[0] // 2] @ w)]

    sizes = [(4,), (5,), (16,), (33,)]
    return Case(step, lambda n: [normal(n, 4)], (B,), sizes)


def loss_scaling() -> Case:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(2)])
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), dynamic_growth_steps=2
    )
    optimizer.build(model.trainable_variables)

    def step(x: Any) -> list[Any]:
        value, gradients = ts.value_and_grad(
            lambda: optimizer.scale_loss(ops.mean(model(x) ** 2)), model.trainable_variables
        )()
        optimizer.apply(gradients, model.trainable_variables)
        return [value, *gradients]

    return Case(step, lambda n: [normal(n, 4)], (B,))


CASES = [
    mlp,
    weighted,
    compiled_model,
    conv,
    flattened,
    lstm,
    attention,
    pooled_over_time,
    own_mean,
    info_nce,
    two_inputs,
    vae,
    own_gradient,
    in_place_and_constants,
    loss_scaling,
]


@pytest.fixture(params=CASES, ids=lambda make: make.__name__)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param()


@pytest.mark.sampled(4)
def test_one_record_computes_at_every_size_what_a_trace_at_that_size_does(case: Case) -> None:
    counted = Counted(case.step)
    traced = record(counted, case.arrays(*case.sizes[0]), case.axes)

    assert counted.runs == 1
    program = traced.build("graph")
    names = list(dict.fromkeys(n for axes in case.axes for n in axes if n))
    for sizes in case.sizes:
        assert traced.violated_assumption(dict(zip(names, sizes, strict=True))) == ""
        arrays = case.arrays(*sizes)
        assert_alike(ran(traced, arrays), ran(record(case.step, arrays), arrays))
    for sizes in case.sizes:
        program(case.arrays(*sizes))
    assert counted.runs == 1


def test_a_step_that_reads_a_variable_of_another_layout_is_recorded_alike() -> None:
    w = keras.Variable(normal(3, 4))
    w._value.data = w._value.data.t().contiguous().t()  # as an optimizer of torch's may leave it
    case = Case(lambda x: [ops.reshape(w, (-1,)), x @ w], lambda n: [normal(n, 3)], (B,))
    traced = record(case.step, case.arrays(2), case.axes)

    assert_alike(
        ran(traced, case.arrays(5)), ran(record(case.step, case.arrays(5)), case.arrays(5))
    )


def test_sizes_below_two_are_run_at_their_own_shape() -> None:
    """torch takes 0 and 1 for constants: such axes broadcast."""
    case = own_mean()
    traced = record(case.step, case.arrays(8), case.axes)

    assert traced.violated_assumption({"b": 0}) == "b >= 2"
    assert traced.violated_assumption({"b": 1}) == "b >= 2"
    assert traced.violated_assumption({"b": 2}) == ""
    assert traced.violated_assumption({"b": 100_000}) == ""


def test_what_python_asked_of_a_size_is_held_against_others() -> None:
    def step(x: Any) -> list[Any]:
        return [ops.sum(x) if x.shape[0] > 8 else ops.max(x)]

    traced = record(step, [normal(5, 4)], (B,))

    assert traced.violated_assumption({"b": 9}) == ""
    assert traced.violated_assumption({"b": 8}).startswith("b > 8 (")
    assert "x.shape[0] > 8" in traced.violated_assumption({"b": 5})  # the line that asked


def test_a_guard_names_the_axes_as_the_user_does() -> None:
    def step(x: Any) -> list[Any]:
        half = x.shape[1] // 2
        return [x[:, :half] - x[:, half:]] if x.shape[1] % 2 == 0 else [ops.sum(x)]

    traced = record(step, [normal(5, 6)], (("rows", "columns"),))

    assert traced.violated_assumption({"rows": 4, "columns": 7}) == ""
    assert "columns % 2" in traced.violated_assumption({"rows": 4, "columns": 8})


@pytest.mark.slow
def test_a_strided_convolution_over_time_is_right_wherever_its_guards_hold() -> None:
    """Keras pads an odd length otherwise than an even one; that is the silent error to catch."""
    model = keras.Sequential(
        [keras.Input((None, 4)), layers.Conv1D(5, 3, strides=2, padding="same"), layers.Dense(3)]
    )
    loss = keras.losses.MeanSquaredError()
    step = trained(model, lambda y, p: loss(y[:, None, :], p))
    traced = record(step, [normal(4, 8, 4), normal(4, 3)], (("b", "t", None), B))

    held = []
    for t in range(2, 20):
        arrays = [normal(4, t, 4), normal(4, 3)]
        if not traced.violated_assumption({"b": 4, "t": t}):
            held.append(t)
            assert_alike(ran(traced, arrays), ran(record(step, arrays), arrays))
    assert held
    assert len(held) < 18


def asks_int(x: Any) -> Any:
    return ops.sum(x) * int(x.shape[0])


def asks_range(x: Any) -> Any:
    return sum(ops.sum(x[i]) for i in range(x.shape[0]))


def asks_float(x: Any) -> Any:
    return ops.sum(x) / float(x.shape[0])


def asks_half(x: Any) -> Any:
    return sum(ops.sum(x[i]) for i in range(x.shape[0] // 2))


def asks_numpy(x: Any) -> Any:
    return x * np.arange(x.shape[0], dtype="float32")[:, None]


def asks_iteration(x: Any) -> Any:
    return ops.stack([ops.sum(row) for row in x])


@pytest.mark.parametrize(
    "asks", [asks_int, asks_range, asks_float, asks_half, asks_numpy, asks_iteration]
)
def test_a_size_that_python_needs_as_a_number_is_refused_with_the_line(
    asks: Callable[[Any], Any],
) -> None:
    with pytest.raises(
        Refused, match=r"`b.*` is needed as a number at .*test_symbolic_sizes.py"
    ) as e:
        record(lambda x: [asks(x)], [normal(6, 4)], (B,))

    line = asks.__code__.co_firstlineno + 1
    assert f"test_symbolic_sizes.py:{line}" in str(e.value)
    assert user_code.raised_at(e.value.__traceback__)[0].endswith(f":{line}")


def test_a_recurrent_layer_over_a_time_that_varies_is_refused() -> None:
    """Keras unrolls it; the refusal names the layer's file and the user's line."""
    model = keras.Sequential([keras.Input((None, 4)), layers.LSTM(3)])

    with pytest.raises(
        Refused, match=r"`t` is needed .* by keras\..*rnn.*, from .*test_symbolic_sizes"
    ):
        record(lambda x: [model(x)], [normal(3, 5, 4)], (("b", "t", None),))


def test_an_error_of_the_step_is_a_refusal_that_carries_it() -> None:
    def step(x: Any) -> list[Any]:
        raise KeyError("mine")

    with pytest.raises(Refused, match="KeyError: 'mine'") as refused:
        record(step, [normal(3, 4)], (B,))

    assert isinstance(refused.value.__cause__, KeyError)


def test_a_value_that_python_asks_for_is_no_matter_of_sizes() -> None:
    with pytest.raises(TensorValueNeeded):
        record(lambda x: [x if ops.sum(x) > 0 else -x], [normal(3, 4)], (B,))


@pytest.mark.parametrize("returned", [lambda x: x.shape[0], lambda x: x.shape[0] / 2])
def test_a_size_is_not_returned_as_the_number_of_the_trace(returned: Callable[[Any], Any]) -> None:
    with pytest.raises(Refused, match="as a number"):
        record(lambda x: [returned(x)], [normal(3, 4)], (B,))


def test_state_of_a_size_that_varies_is_refused() -> None:
    last = keras.Variable(np.zeros((6, 4), "float32"))

    def step(x: Any) -> list[Any]:
        last.assign(x)
        return [ops.sum(x)]

    with pytest.raises(Refused):
        record(step, [normal(6, 4)], (B,))
    np.testing.assert_array_equal(last.numpy(), 0.0)


def test_what_torch_cannot_record_runs_as_python_at_any_size() -> None:
    def step(x: Any) -> list[Any]:
        return [ops.while_loop(lambda v: ops.sum(v) < 100.0, lambda v: (v * 2.0,), (x,))[0]]

    traced = record(step, [np.ones((3, 4), "float32")], (B,))

    assert traced.uncompiled
    assert traced.violated_assumption({"b": 1}) == ""
    for n in (1, 5):
        arrays = [np.ones((n, 4), "float32")]
        assert_alike(ran(traced, arrays), ran(record(step, arrays), arrays))


def test_arrays_of_different_names_may_have_different_sizes() -> None:
    def step(x: Any, y: Any) -> list[Any]:
        return [ops.matmul(x, ops.transpose(y)), ops.sum(x) / y.shape[0]]

    traced = record(step, [normal(3, 4), normal(5, 4)], (("m", None), ("n", None)))
    for m, n in ((2, 7), (6, 3), (5, 5)):
        arrays = [normal(m, 4), normal(n, 4, seed=1)]
        assert traced.violated_assumption({"m": m, "n": n}) == ""
        assert_alike(ran(traced, arrays), ran(record(step, arrays), arrays))


def test_layers_that_are_built_while_recording_can_be_used_afterwards() -> None:
    model = keras.Sequential([layers.Dense(5), layers.BatchNormalization(), layers.Dense(1)])
    optimizer = keras.optimizers.Adam()

    def step(x: Any) -> list[Any]:
        model(x)
        value, gradients = ts.value_and_grad(
            lambda: ops.mean(model(x, training=True) ** 2), model.trainable_variables
        )()
        optimizer.apply(gradients, model.trainable_variables)
        return [value]

    traced = record(step, [normal(6, 4)], (B,))

    assert all(type(v._value) is torch.nn.Parameter for v in model.variables)
    for n in (3, 9):
        arrays = [normal(n, 4)]
        assert_alike(ran(traced, arrays), ran(record(step, arrays), arrays))
    assert model(normal(2, 4)).shape == (2, 1)


@pytest.mark.slow
def test_nothing_is_left_of_a_trace() -> None:
    """Neither the names that lead elsewhere while it lasts, nor the stand-ins."""
    import gc

    from keras.src.backend.common import dtypes
    from torch._subclasses.fake_tensor import FakeTensor

    def fakes() -> set[int]:
        gc.collect()
        return {id(x) for x in gc.get_objects() if type(x) is FakeTensor}

    before = fakes()
    select = torch._C._select_conv_backend
    case = conv()
    traced = record(case.step, case.arrays(4), case.axes)
    with pytest.raises(Refused):
        record(lambda x: [asks_int(x)], [normal(6, 4)], (B,))

    assert torch._C._select_conv_backend is select
    assert torch.SymInt not in dtypes.PYTHON_DTYPES_MAP
    assert not fakes() - before
    assert traced.violated_assumption({"b": 3}) == ""
