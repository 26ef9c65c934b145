"""Sizes that vary, through the Trainer: Keras's numbers for batches of any size, few programs.

Tolerance: another size of the same program sums in another order, by a few float32 roundings.
Weights are trained with SGD: Adam turns the rounding of a gradient near zero into a whole step.
"""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import trainstep as ts
from tests.helpers import assert_same, host, normal, values_of
from tests.streams import Witness, kinds, ones
from tests.twins import assert_logs, assert_twins, lone, mlp, regression, twins
from trainstep.testing import filling, wait_for_compilation

EXACT = 1e-5

pytestmark = pytest.mark.filterwarnings("error::trainstep.SizesWarning")


def on_jax() -> bool:
    return keras.backend.backend() == "jax"


def batch(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return normal(n, 6, seed=seed), normal(n, 2, seed=500 + seed)


def entries(trainer: ts.Trainer, name: str) -> list[ts.TraceEvent]:
    return [event for event in trainer.ledger if name in event.function]


def traces(trainer: ts.Trainer) -> int:
    """How often Python ran, by the ledger."""
    return kinds(trainer.ledger)["trace"]


def normalized() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(4, "tanh", activity_regularizer="l2"),
            layers.BatchNormalization(momentum=0.7),
            layers.Dense(2),
        ]
    )


class BatchLosses(keras.callbacks.Callback):
    """Remembers what a batch's end shows."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.found.append(float(logs["loss"]))


# A batch at a time.


@pytest.mark.slow
def test_a_stream_of_batches_is_trained_on_as_with_exact_shapes() -> None:
    trainer = lone(normalized, regression, shapes=ts.Shapes(background=False, patience=3))
    exactly = lone(normalized, regression, shapes="exact")
    sizes = (8, 5, 1, 5)
    with filling("nan"):  # in what pads a batch; here and there nothing does
        found = [dict(trainer.train_on_batch(*batch(n, i))) for i, n in enumerate(sizes)]
    wanted = [dict(exactly.train_on_batch(*batch(n, i))) for i, n in enumerate(sizes)]
    for mine, theirs in zip(found, wanted, strict=True):
        assert_logs(mine, theirs, EXACT)
    assert_twins(trainer, exactly.model, EXACT)
    assert traces(trainer) == 2 + ones()
    assert traces(exactly) == 3


@pytest.mark.slow
def test_a_stream_of_batches_is_that_of_keras() -> None:
    """Weighted and unweighted metrics, weights of samples; trained, tested and predicted."""

    def arguments() -> dict[str, Any]:
        return {
            "optimizer": keras.optimizers.SGD(0.05),
            "loss": "mse",
            "metrics": ["mae"],
            "weighted_metrics": [keras.metrics.MeanSquaredError(name="weighted")],
        }

    theirs, trainer = twins(mlp, arguments)
    for i, n in enumerate((8, 3, 8)):
        x, y = batch(n, i)
        weight = np.abs(normal(n, seed=i))
        got = trainer.train_on_batch(x, y, sample_weight=weight)
        theirs.reset_metrics()
        wanted = theirs.train_on_batch(x, y, sample_weight=weight, return_dict=True)
        assert_logs(got, wanted, EXACT)
        theirs.reset_metrics()
        wanted = theirs.test_on_batch(x, y, return_dict=True)
        assert_logs(trainer.test_on_batch(x, y), wanted, EXACT)
        outputs = trainer.predict_on_batch(x)
        assert type(outputs) is type(ops.convert_to_tensor(x))
        assert tuple(outputs.shape) == (n, 2)
        np.testing.assert_allclose(
            host(outputs), theirs.predict_on_batch(x), rtol=EXACT, atol=EXACT
        )
    assert_twins(trainer, theirs, EXACT)
    for step in ("train", "test", "predict"):
        assert kinds(entries(trainer, step))["trace"] == 2, step
    wait_for_compilation()


def test_a_counting_layer_agrees_with_the_trainers_ledger() -> None:
    witness = Witness()
    model = keras.Sequential([keras.Input((6,)), layers.Dense(2), witness])
    witness.runs = 0
    trainer = ts.Trainer(model, "sgd", "mse")
    for i, n in enumerate(np.random.default_rng(0).integers(1, 20, 30)):
        trainer.train_on_batch(*batch(int(n), i))
    assert witness.runs == traces(trainer) == 2 + ones()
    wait_for_compilation()


def test_the_trainers_trace_count_counts_no_programs_for_sizes() -> None:
    trainer = lone(mlp, regression, shapes=ts.Shapes("bucket", grid=(4, 16)))
    for n in (3, 9, 4):
        trainer.train_on_batch(*batch(n))
    assert trainer.trace_count == traces(trainer) == 1


# Whole data sets.


def test_three_epochs_with_a_short_last_batch_are_two_programs() -> None:
    theirs, trainer = twins(mlp, regression)
    x, y = batch(100)
    mine, shown = BatchLosses(), BatchLosses()
    options: dict[str, Any] = {"epochs": 3, "batch_size": 32, "shuffle": False}
    found = trainer.fit(x, y, callbacks=[mine], progress=False, **options).history
    wanted = theirs.fit(x, y, callbacks=[shown], verbose=0, **options).history
    wait_for_compilation()
    assert_logs(found, wanted, EXACT)
    np.testing.assert_allclose(mine.found, shown.found, rtol=EXACT)
    assert_twins(trainer, theirs, EXACT)
    steps = entries(trainer, "train")
    programs = [e for e in steps if e.kind in ("trace", "bucket") and e.compile_seconds > 0]
    assert len(programs) <= 2, trainer.ledger
    assert kinds(steps)["trace"] == 2
    assert kinds(steps)["refused"] == 0


def test_the_loss_of_the_short_last_batch_is_its_true_mean() -> None:
    trainer = lone(mlp, regression)
    x, y = batch(100)
    for start in range(0, 96, 32):
        trainer.train_on_batch(x[start : start + 32], y[start : start + 32])
    weights = values_of(trainer.model.weights)
    found = trainer.train_on_batch(x[96:], y[96:])
    hidden = np.tanh(x[96:] @ weights[0] + weights[1])
    wanted = np.mean((hidden @ weights[2] + weights[3] - y[96:]) ** 2)
    assert found["loss"] == pytest.approx(wanted, rel=1e-5)


def test_evaluate_and_predict_over_a_short_last_batch() -> None:
    theirs, trainer = twins(normalized, regression)
    x, y = batch(21)
    assert_logs(
        trainer.evaluate(x, y, batch_size=8),
        theirs.evaluate(x, y, batch_size=8, return_dict=True, verbose=0),
        EXACT,
    )
    found = trainer.predict(x, batch_size=8)
    assert isinstance(found, np.ndarray)
    assert found.shape == (21, 2)
    np.testing.assert_allclose(found, theirs.predict(x, batch_size=8, verbose=0), rtol=1e-4)
    for step in ("test", "predict"):
        assert kinds(entries(trainer, step))["trace"] == 2, step


@pytest.mark.slow
def test_fit_on_a_generator_of_random_sizes() -> None:
    sizes = [int(n) for n in np.random.default_rng(5).integers(2, 25, 4)]

    def batches() -> Any:
        for i, n in enumerate(sizes):
            yield batch(n, i)

    trainer, other = lone(mlp, regression), lone(mlp, regression, shapes="exact")
    mine = BatchLosses()
    trainer.fit(batches, epochs=1, callbacks=[mine], progress=False)
    total, rows = 0.0, 0
    with warnings.catch_warnings():
        for (x, y), shown in zip(batches(), mine.found, strict=True):
            # Logs of `fit` are means of the epoch so far; in this model a loss is a mean of rows.
            total += float(other.run("loss", x, y, update=True)) * len(x)
            rows += len(x)
            assert shown == pytest.approx(total / rows, rel=1e-4)
    assert traces(trainer) == 2
    assert_same(trainer.model.weights, other.model.weights, 1e-5, 1e-5)
    wait_for_compilation()


# Several inputs and outputs.


def heads() -> keras.Model:
    x, z = keras.Input((6,), name="x"), keras.Input((3,), name="z")
    h = layers.Concatenate()([layers.Dense(4, "tanh")(x), z])
    return keras.Model(
        {"x": x, "z": z}, {"a": layers.Dense(1, name="a")(h), "b": layers.Dense(2, name="b")(h)}
    )


def two_losses() -> dict[str, Any]:
    return {
        "optimizer": keras.optimizers.SGD(0.05),
        "loss": {"a": "mse", "b": "mae"},
        "loss_weights": {"a": 1.0, "b": 0.5},
        "metrics": {"a": ["mae"]},
    }


def two_outputs(n: int, seed: int = 0) -> tuple[Any, Any]:
    x = {"x": normal(n, 6, seed=seed), "z": normal(n, 3, seed=seed + 1)}
    return x, {"a": normal(n, 1, seed=seed + 2), "b": normal(n, 2, seed=seed + 3)}


def test_losses_of_several_outputs_are_weighted_by_samples() -> None:
    """Ten rows in batches of eight: the mean over rows, not over the two batches."""
    trainer = lone(heads, two_losses)
    x, y = two_outputs(10, seed=40)
    found = trainer.evaluate(x, y, batch_size=8)
    outputs = {k: host(v) for k, v in trainer.model(x).items()}
    a = np.mean((outputs["a"] - y["a"]) ** 2)
    b = np.mean(np.abs(outputs["b"] - y["b"]))
    names = {"a": next(n for n in found if n in ("a_loss", "loss_a")), "b": "b_loss"}
    assert found[names["a"]] == pytest.approx(a, rel=1e-5)
    assert found[names["b"]] == pytest.approx(b, rel=1e-5)
    assert found["loss"] == pytest.approx(a + 0.5 * b, rel=1e-5)
    assert found["a_mae"] == pytest.approx(np.mean(np.abs(outputs["a"] - y["a"])), rel=1e-5)


@pytest.mark.slow
def test_a_stream_for_several_inputs_and_outputs() -> None:
    trainer, exactly = lone(heads, two_losses), lone(heads, two_losses, shapes="exact")
    for i, n in enumerate((6, 3, 6)):
        x, y = two_outputs(n, seed=10 * i)
        assert_logs(trainer.train_on_batch(x, y), exactly.train_on_batch(x, y), EXACT)
        outputs = trainer.predict_on_batch(x)
        assert tuple(outputs["a"].shape) == (n, 1)
        assert tuple(outputs["b"].shape) == (n, 2)
    assert_twins(trainer, exactly.model, EXACT)
    assert kinds(entries(trainer, "train"))["trace"] == 2
    wait_for_compilation()


# Sequences.


@pytest.mark.parametrize("masked", [False, True])
def test_time_distributed_with_varying_time_is_right(masked: bool) -> None:
    """Keras leaves out steps or masks under an unknown time on TensorFlow; ours may refuse."""
    ids = keras.Input((None,), dtype="int32")
    h = layers.Embedding(7, 3, mask_zero=masked)(ids)
    h = layers.TimeDistributed(layers.Dense(4, "tanh"))(h)
    outputs = layers.Dense(2)(layers.GlobalAveragePooling1D()(h))
    trainer = ts.Trainer(keras.Model(ids, outputs), "sgd", "mse", dynamic={"x": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ts.SizesWarning)
        for i, (n, time) in enumerate(((4, 5), (3, 2), (5, 7))):
            x = np.random.default_rng(i).integers(0, 7, (n, time)).astype("int32")
            x[:, 0] = 1
            found, wanted = trainer.predict_on_batch(x), trainer.model(x)
            np.testing.assert_allclose(host(found), host(wanted), rtol=EXACT, atol=EXACT)


@pytest.mark.slow
def test_targets_along_time_vary_with_it() -> None:
    """A tag for every word: the time of `x` and that of `y` are one, by name or by size."""

    def build() -> keras.Model:
        return keras.Sequential([keras.Input((None, 3)), layers.Dense(2)])

    trainer = lone(build, regression, dynamic={"x": 1, "y": 1})
    exactly = lone(build, regression, shapes="exact")
    for i, (n, time) in enumerate(((4, 5), (3, 2), (4, 5))):
        x, y = normal(n, time, 3, seed=i), normal(n, time, 2, seed=i)
        assert_logs(trainer.train_on_batch(x, y), exactly.train_on_batch(x, y), EXACT)
        assert tuple(trainer.predict_on_batch(x).shape) == (n, time, 2)
    assert_twins(trainer, exactly.model, EXACT)


# Changes between batches.


def test_the_learning_rate_changes_without_a_program() -> None:
    optimizer = keras.optimizers.SGD(0.1)
    trainer = ts.Trainer(mlp(), optimizer, "mse", shapes=ts.Shapes("bucket", grid=(16,)))
    trainer.train_on_batch(*batch(6))
    entries, before = len(trainer.ledger), values_of(trainer.model.weights)
    trainer.optimizer.learning_rate = 0.0
    trainer.train_on_batch(*batch(4))
    assert_same(trainer.model.weights, before, 0, 0)
    trainer.optimizer.learning_rate = 0.1
    trainer.train_on_batch(*batch(3))
    assert np.any(host(trainer.model.weights[0]) != before[0])
    assert len(trainer.ledger) == entries


@pytest.mark.slow
def test_a_trainer_inside_a_function_takes_batches_of_many_sizes() -> None:
    trainer, exactly = lone(mlp, regression), lone(mlp, regression, shapes="exact")

    @ts.function
    def step(x: Any, y: Any) -> Any:
        return trainer.train_on_batch(x, y)["loss"]

    for i, n in enumerate((6, 4, 6)):
        wanted = exactly.train_on_batch(*batch(n, i))["loss"]
        assert float(step(*batch(n, i))) == pytest.approx(wanted, rel=1e-5)
    assert step.trace_count == 2
    assert_twins(trainer, exactly.model, EXACT)


# Wrong batches.


def test_x_and_y_of_different_lengths_are_refused_at_every_size() -> None:
    trainer = lone(mlp, regression)
    for n in (6, 4):
        trainer.train_on_batch(*batch(n))
    before = values_of(trainer.model.weights)
    for n, m in ((6, 4), (5, 7), (1, 3)):
        with pytest.raises(ts.ArgumentError):
            trainer.train_on_batch(batch(n)[0], batch(m)[1])
    assert_same(trainer.model.weights, before, 0, 0)


def test_a_limit_of_traces_holds_for_sizes() -> None:
    trainer = lone(mlp, regression, max_traces=2)
    for i, n in enumerate((6, 4, 9, 2, 30)):
        trainer.train_on_batch(*batch(n, i))
    assert traces(trainer) == 2
    wait_for_compilation()


def test_dynamic_of_a_trainer_is_checked() -> None:
    for dynamic in ({"z": 1}, {"x": "time"}):
        with pytest.raises(ts.ArgumentError, match=r"(?s)`dynamic`.*expected.*got.*to fix"):
            lone(mlp, regression, dynamic=dynamic).train_on_batch(*batch(4))


@pytest.mark.slow
def test_a_loss_scale_that_is_made_in_a_record_for_all_sizes_is_no_constant() -> None:
    """Before it is built, Keras's loss-scaling optimizer scales by a Python number."""
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=4.0, dynamic_growth_steps=2
    )
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    policy = "bucket" if keras.backend.backend() == "jax" else "dynamic"
    trainer = ts.Trainer(model, optimizer, "mse", shapes=ts.Shapes(policy, background=False))
    twin = keras.models.clone_model(model)
    twin.set_weights(model.get_weights())
    exactly = ts.Trainer(twin, keras.optimizers.SGD(0.1), "mse", shapes="exact")
    for n in (6, 4, 5, 7, 3):
        x, y = np.ones((n, 3), "float32"), np.ones((n, 1), "float32")
        trainer.train_on_batch(x, y)
        exactly.train_on_batch(x, y)
    assert float(optimizer.dynamic_scale.value) == 16.0  # doubled after every two steps
    for mine, right in zip(model.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-5)  # scaling by powers of two is exact
