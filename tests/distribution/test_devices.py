"""Several devices give the numbers of one.

TOLERANCE: in float64, after a few steps of Adam. Parts are summed in another order than the whole,
which is rounding (1e-16), and Adam divides by the root of small numbers (1e-12 was seen).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import trainstep as ts

TOLERANCE = 1e-10
JAX = keras.backend.backend() == "jax"
pytestmark = [
    pytest.mark.devices,
    pytest.mark.sampled(3),
    pytest.mark.skipif(
        keras.backend.backend() == "torch", reason="torch has one device in a process"
    ),
]
on_jax = pytest.mark.skipif(not JAX, reason="asks JAX's arrays where they are, or is about Sharded")
Model = Callable[[], Any]
Batch = tuple[Any, Any, Any]


def mlp() -> Any:
    return keras.Sequential(
        [layers.Input((6,)), layers.Dense(48, activation="tanh"), layers.Dense(1)]
    )


def with_batch_norm() -> Any:
    return keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(48, use_bias=False, name="wide"),
            layers.BatchNormalization(),
            layers.Dropout(0.2, seed=3),
            layers.Dense(1, kernel_regularizer="l2"),
        ]
    )


def with_layer_norm() -> Any:
    return keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(48, activation="relu", activity_regularizer="l2"),
            layers.LayerNormalization(),
            layers.Dense(1),
        ]
    )


def trainer_of(make: Model, strategy: Any = None, **more: Any) -> ts.Trainer:
    keras.utils.set_random_seed(0)
    return ts.Trainer(
        make(),
        optimizer=keras.optimizers.Adam(1e-2),
        loss="mse",
        metrics=["mae"],
        weighted_metrics=["mse"],
        strategy=strategy,
        **more,
    )


def batches(*rows: int) -> list[Batch]:
    rng = np.random.default_rng(0)
    return [
        (rng.normal(size=(n, 6)), rng.normal(size=(n, 1)), rng.uniform(0.5, 2.0, n)) for n in rows
    ]


def state(trainer: ts.Trainer) -> dict[str, Any]:
    """All that training changes."""
    found = (
        *trainer.model.variables,
        *trainer.optimizer.variables,
        *trainer.model.metrics_variables,
    )
    return {f"{place} {v.path}": np.asarray(v.value) for place, v in enumerate(found)}


def assert_same(one: ts.Trainer, other: ts.Trainer) -> None:
    for (name, a), b in zip(state(one).items(), state(other).values(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE, err_msg=name)


def trained(trainer: ts.Trainer, data: Sequence[Batch]) -> list[dict[str, float]]:
    return [dict(trainer.train_on_batch(*batch)) for batch in data]


@pytest.mark.parametrize("model", [mlp, with_batch_norm, with_layer_norm])
@pytest.mark.parametrize(
    ("kind", "count"),
    [("mirrored", 2), ("mirrored", 3), ("mirrored", 4), *([("sharded", 4)] if JAX else [])],
)
def test_batches_of_any_size(wide: None, model: Model, kind: str, count: int) -> None:
    data = batches(32, 32, 31, 1, 32, 31)
    strategy = {"mirrored": ts.Mirrored, "sharded": ts.Sharded}[kind](range(count))
    one, several = trainer_of(model), trainer_of(model, strategy)
    for expected, found in zip(trained(one, data), trained(several, data), strict=True):
        assert found == pytest.approx(expected, rel=0, abs=TOLERANCE)
    assert_same(one, several)
    programs = several._functions.step("train").program_count
    assert programs <= 2


def test_one_row_on_four_devices_first(wide: None) -> None:
    data = batches(1, 2, 3)
    one, several = trainer_of(mlp), trainer_of(mlp, ts.Mirrored())
    trained(one, data)
    trained(several, data)
    assert_same(one, several)


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_fit_with_a_ragged_end(wide: None, steps_per_call: int) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(170, 6)), rng.normal(size=(170, 1))
    histories, trainers = [], []
    for strategy in (None, ts.Mirrored()):
        trainer = trainer_of(with_batch_norm, strategy)
        keras.utils.set_random_seed(5)
        history = trainer.fit(
            x,
            y,
            epochs=2,
            batch_size=32,
            validation_data=(x[:33], y[:33]),
            steps_per_call=steps_per_call,
            progress=False,
        )
        histories.append(history.history)
        trainers.append(trainer)
    for name, values in histories[0].items():
        assert histories[1][name] == pytest.approx(values, rel=0, abs=TOLERANCE), name
    assert_same(*trainers)
    predictions = [t.predict(x[:21], progress=False) for t in trainers]
    np.testing.assert_allclose(*predictions, rtol=0, atol=TOLERANCE)


@on_jax
def test_where_things_are() -> None:
    mirrored, sharded = trainer_of(mlp, ts.Mirrored()), trainer_of(mlp, ts.Sharded())
    wide = keras.Sequential([layers.Input((6,)), layers.Dense(512), layers.Dense(1)])
    large = trainer_of(lambda: wide, ts.Sharded())
    for trainer in (mirrored, sharded, large):
        trained(trainer, batches(32))
    kernel = mirrored.model.layers[0].kernel.value
    assert len(kernel.devices()) == 4
    assert kernel.sharding.is_fully_replicated
    assert sharded.model.layers[0].kernel.value.sharding.is_fully_replicated  # too small to cut
    kernel = large.model.layers[0].kernel.value
    slot = next(v for v in large.optimizer.variables if v.path.endswith("kernel_momentum")).value
    for value in (kernel, slot):
        assert value.addressable_shards[0].data.size * 4 == value.size
    assert sharded.model.layers[1].bias.value.sharding.is_fully_replicated


@on_jax
def test_the_work_is_split() -> None:
    """Each device multiplies its rows: of 30 on 4, eight at most."""
    import jax

    rows: list[str] = []
    real = jax.stages.Lowered.compile

    def compile_(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = real(self, *args, **kwargs)
        rows.extend(line for line in compiled.as_text().splitlines() if " dot(" in line)
        return compiled

    for count, most in ((32, 8), (30, 8)):
        rows.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.stages.Lowered, "compile", compile_)
            trained(trainer_of(mlp, ts.Mirrored()), batches(count))
        assert rows
        assert not any(f"[{count}," in line for line in rows)
        assert any(f"[{most},48]" in line for line in rows)


def test_a_function_of_ones_own(wide: None) -> None:
    data = batches(32, 31, 1)
    results = []
    others = [ts.Mirrored(), ts.Sharded(range(3)) if JAX else ts.Mirrored(range(3))]
    for strategy in (ts.Single(), *others):
        keras.utils.set_random_seed(0)
        model, optimizer = mlp(), keras.optimizers.Adam(1e-2)
        mean = keras.metrics.MeanAbsoluteError()

        def step(x: Any, y: Any, model: Any = model, optimizer: Any = optimizer, mean: Any = mean):
            def loss_of() -> Any:
                predicted = model(x, training=True)
                mean.update_state(y, predicted)
                each = ops.mean(ops.square(y - predicted), axis=-1)
                return ops.mean(each), each

            variables = model.trainable_variables
            rows, gradients = ts.value_and_grad(loss_of, variables, has_aux=True)()
            optimizer.apply(gradients, variables)
            return rows

        found = []
        for x, y, _ in data:
            loss, each = strategy.run(step, args=(x, y))
            found.append(float(strategy.reduce("mean", loss)))
            assert found[-1] == pytest.approx(float(strategy.reduce("mean", each, axis=0)))
        results.append([*found, float(mean.result()), *map(np.asarray, model.get_weights())])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE)


@on_jax
def test_scope_is_for_what_is_made_inside() -> None:
    strategy = ts.Mirrored()
    with strategy.scope():
        trainer = trainer_of(mlp)
        double = ts.function(lambda x: 2 * x)
    outside = ts.function(lambda x: 2 * x)
    trained(trainer, batches(32))
    assert len(trainer.model.layers[0].kernel.value.devices()) == 4
    assert len(double(np.ones(8)).devices()) == 4
    assert len(outside(np.ones(8)).devices()) == 1


@on_jax
def test_a_compiled_function_runs_under_a_strategy() -> None:
    double = ts.function(lambda x: 2 * x, name="double")
    strategy = ts.Mirrored()
    assert len(strategy.run(double, args=(np.ones(8),)).devices()) == 4
    strategy.run(double, args=(np.ones(8),))
    assert double.trace_count == 0
    assert len(double(np.ones(8)).devices()) == 1


@on_jax
def test_keras_own_distribution_is_kept_to(wide: None) -> None:
    data = batches(32, 30, 1)
    one = trainer_of(with_batch_norm)
    trained(one, data)
    devices = keras.distribution.list_devices()
    mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"], devices)
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*wide.*kernel"] = (None, "model")
    for distribution in (
        keras.distribution.DataParallel(devices=devices),
        keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch"),
    ):
        keras.distribution.set_distribution(distribution)
        try:
            several = trainer_of(with_batch_norm)
            trained(several, data)
        finally:
            keras.distribution.set_distribution(None)
        assert_same(one, several)
        assert len(several.model.layers[0].kernel.value.devices()) == 4


def test_changes_between_batches(wide: None) -> None:
    one, several = trainer_of(mlp), trainer_of(mlp, ts.Mirrored())
    for trainer in (one, several):
        trained(trainer, batches(32))
        trainer.optimizer.learning_rate.assign(0.5)
        kept = [np.asarray(v.value).copy() for v in trainer.model.weights]
        held = [v.value if JAX else ops.copy(v) for v in trainer.model.weights]
        trained(trainer, batches(32))
        for before, value in zip(kept, held, strict=True):  # a snapshot stays as it was
            np.testing.assert_array_equal(before, np.asarray(value))
        trainer.model.layers[0].trainable = False
        trained(trainer, batches(32))
        trainer.model.set_weights([2 * w for w in trainer.model.get_weights()])
        trained(trainer, batches(32))
    assert_same(one, several)
    assert several._functions.step("train").trace_count == 2


@on_jax
def test_arrays_that_lie_elsewhere_are_moved() -> None:
    import jax

    x, y, _ = batches(32)[0]
    one, several = trainer_of(mlp), trainer_of(mlp, ts.Mirrored())
    x, y = x.astype("float32"), y.astype("float32")
    elsewhere = jax.device_put(x, jax.devices()[2]), jax.device_put(y, jax.devices()[1])
    expected = dict(one.train_on_batch(x, y))
    assert dict(several.train_on_batch(*elsewhere)) == pytest.approx(expected, rel=1e-5)


def test_a_function_without_a_strategy_follows_its_variables(wide: None) -> None:
    one, several = trainer_of(mlp), trainer_of(mlp, ts.Mirrored())
    (x, y, w), *_ = batches(31)
    for trainer in (one, several):
        trainer.train_on_batch(x, y, w)
    found = [ts.function(lambda x, m=t.model: m(x))(x) for t in (one, several)]
    np.testing.assert_allclose(*map(np.asarray, found), rtol=0, atol=TOLERANCE)


def test_variables_that_move_after_a_program_was_made(wide: None) -> None:
    keras.utils.set_random_seed(0)
    model = mlp()
    (x, y, w), *_ = batches(32)
    predict = ts.function(lambda x: model(x))
    before = np.asarray(predict(x))
    trainer = ts.Trainer(model, optimizer="sgd", loss="mse", strategy=ts.Mirrored())
    trainer.optimizer.learning_rate.assign(0.0)
    trainer.train_on_batch(x, y, w)
    np.testing.assert_allclose(np.asarray(predict(x)), before, rtol=0, atol=TOLERANCE)


def test_a_snapshot_from_before_variables_moved() -> None:
    one = trainer_of(mlp)
    trained(one, batches(32))
    held = [v.value if JAX else ops.copy(v) for v in one.model.weights]
    kept = [np.asarray(x).copy() for x in held]
    several = ts.Trainer(one.model, optimizer="sgd", loss="mse", strategy=ts.Mirrored())
    trained(several, batches(32, 32))
    for before, value in zip(kept, held, strict=True):
        np.testing.assert_array_equal(before, np.asarray(value))


def test_strategies_in_turn(wide: None) -> None:
    """Also with sizes that vary, whose programs are found another way."""

    def model() -> Any:
        return keras.Sequential(
            [layers.Input((6,)), layers.Dense(256, activation="tanh"), layers.Dense(1)]
        )

    weights = []
    middle = ts.Sharded() if JAX else ts.Mirrored([3, 1, 2])
    for strategies in ([ts.Single()] * 3, [ts.Mirrored(), middle, ts.Mirrored([0, 1])]):
        keras.utils.set_random_seed(0)
        shared = model()
        trainers = [
            ts.Trainer(shared, optimizer="sgd", loss="mse", strategy=strategy)
            for strategy in strategies
        ]
        for _ in range(2):
            for trainer in trainers:
                trained(trainer, batches(32, 31, 30))
        weights.append(shared.get_weights())
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE)


def test_calls_to_the_host_are_refused() -> None:
    def step(x: Any) -> Any:
        ts.print("sum", ops.sum(x))
        return x

    with pytest.raises(ts.StrategyError, match=r"cannot call the host[\s\S]*to fix:"):
        ts.Mirrored().run(step, args=(np.ones(8),))
    ts.Mirrored([0]).run(step, args=(np.ones(8),))


def test_the_ledger_has_one_entry_per_trace() -> None:
    trainer = trainer_of(mlp, ts.Mirrored(), shapes="exact")
    trained(trainer, batches(32, 31, 32, 31))
    assert len(trainer.ledger) == 2
    assert "float64[31,6]" in str(trainer.ledger[1]) or "float32[31,6]" in str(trainer.ledger[1])


def test_doctor_reports_a_retrace_once() -> None:
    with ts.doctor() as found:
        trainer = trainer_of(mlp, ts.Mirrored(), shapes="exact")
        trained(trainer, batches(32, 31))
    traces = [t for t in found.report.functions if "train" in t.name]
    assert [t.traces for t in traces] == [2]


@pytest.mark.parametrize("nan_policy", ["skip", "raise"])
def test_bad_batches(wide: None, nan_policy: str) -> None:
    bad = (np.full((32, 6), np.nan), np.ones((32, 1)), np.ones(32))
    trainer = trainer_of(mlp, ts.Mirrored(), nan_policy=nan_policy, check_values=False)
    trained(trainer, batches(32))
    before = state(trainer)
    if nan_policy == "raise":
        with pytest.raises(ts.NonFiniteError):
            trainer.train_on_batch(*bad)
    else:
        trainer.train_on_batch(*bad)
    for name, value in state(trainer).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    assert trainer.skipped == 1


def test_wrong_arguments() -> None:
    for make in (ts.Mirrored, ts.Sharded) if JAX else (ts.Mirrored,):
        with pytest.raises(ts.ArgumentError, match=r"argument `devices`[\s\S]*at least one device"):
            make([])
        with pytest.raises(ts.ArgumentError, match=r"argument `devices`[\s\S]*'gpu:9'|99"):
            make([99])
    with pytest.raises(ts.ArgumentError, match=r"argument `strategy`[\s\S]*got: +'mirrored'"):
        ts.function(lambda x: x, strategy="mirrored")  # type: ignore[call-overload]
    with pytest.raises(ts.ArgumentError, match=r"argument `strategy`[\s\S]*Mirrored"):
        trainer_of(mlp, "mirrored")
    with pytest.raises(ts.ArgumentError, match=r"argument `how`[\s\S]*got: +'max'"):
        ts.Mirrored().reduce("max", 1.0)
    with pytest.raises(ts.ArgumentError, match=r"argument `fn`[\s\S]*a function"):
        ts.Mirrored().run(3)  # type: ignore[arg-type]
