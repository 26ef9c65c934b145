"""What changes between two batches takes effect at the next, and is traced only if it must be.

Tolerance: a few float32 roundings over a few steps of SGD.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import trainstep as ts
from tests.helpers import assert_same, host, normal, values_of
from tests.twins import assert_logs, assert_twins, compiled, lone, mlp, regression, twins

EXACT = 3e-6
X, Y = normal(8, 6, seed=1), normal(8, 2, seed=2)


def plain() -> dict[str, Any]:
    """SGD without a memory: a step's size tells the rate."""
    return {"optimizer": keras.optimizers.SGD(0.05), "loss": "mse", "metrics": ["mae"]}


def moved(trainer: ts.Trainer) -> list[np.ndarray]:
    """What one step adds to the weights, started from the same ones each time."""
    before = trainer.model.get_weights()
    trainer.train_on_batch(X, Y)
    after = trainer.model.get_weights()
    trainer.model.set_weights(before)
    return [a - b for a, b in zip(after, before, strict=True)]


def length(arrays: list[np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(a.astype("float64") ** 2) for a in arrays)))


def test_learning_rate() -> None:
    trainer = lone(mlp, plain)
    first = moved(trainer)
    trainer.optimizer.learning_rate = 0.2
    for a, b in zip(moved(trainer), first, strict=True):
        np.testing.assert_allclose(a, 4 * b, rtol=1e-3, atol=1e-6)  # differences of rounded sums
    trainer.optimizer.learning_rate = 0.0
    assert length(moved(trainer)) == 0
    assert trainer.trace_count == len(trainer.ledger) == 1


def test_learning_rate_as_keras_reads_it() -> None:
    theirs, trainer = twins(mlp, regression)
    for rate in (0.05, 0.01, 0.1, 0.02):
        theirs.optimizer.learning_rate = rate
        trainer.optimizer.learning_rate = rate
        theirs.train_on_batch(X, Y)
        trainer.train_on_batch(X, Y)
    assert_twins(trainer, theirs, EXACT)
    assert trainer.trace_count == 1


def test_clip_norm() -> None:
    """A step of plain SGD is as long as the rate times the clipped norm."""
    trainer = lone(mlp, plain, clip_norm=0.1)
    assert trainer.clip_norm == pytest.approx(0.1)
    assert length(moved(trainer)) == pytest.approx(0.05 * 0.1, rel=1e-4)
    trainer.clip_norm = 0.02
    assert trainer.clip_norm == pytest.approx(0.02)
    assert length(moved(trainer)) == pytest.approx(0.05 * 0.02, rel=1e-4)
    trainer.clip_norm = 1e6  # as good as none
    free = length(moved(trainer))
    assert free > 0.05 * 0.1
    assert trainer.trace_count == 1
    assert free == pytest.approx(length(moved(lone(mlp, plain))), rel=1e-4)


def two_outputs() -> keras.Model:
    x = keras.Input((6,))
    return keras.Model(x, [layers.Dense(2, name="p")(x), layers.Dense(2, name="q")(x)])


@pytest.mark.slow
@pytest.mark.parametrize("structure", [list, dict])
def test_loss_weights(structure: type) -> None:
    """New weights give what a trainer that was made with them gives."""

    def weights(p: float, q: float) -> Any:
        return [p, q] if structure is list else {"p": p, "q": q}

    def arguments(p: float, q: float) -> Callable[[], dict[str, Any]]:
        losses = ["mse", "mae"] if structure is list else {"p": "mse", "q": "mae"}
        return lambda: {"optimizer": "sgd", "loss": losses, "loss_weights": weights(p, q)}

    y = [Y, -Y] if structure is list else {"p": Y, "q": -Y}
    trainer = lone(two_outputs, arguments(1.0, 0.5))
    trainer.train_on_batch(X, y)
    for p, q in ((0.0, 3.0), (2.5, 0.1)):
        made_so = lone(two_outputs, arguments(p, q))
        made_so.model.set_weights(trainer.model.get_weights())
        trainer.loss_weights = weights(p, q)
        assert_logs(trainer.train_on_batch(X, y), made_so.train_on_batch(X, y), EXACT)
        assert_same(trainer.model.weights, made_so.model.weights, EXACT, EXACT)
        assert_logs(trainer.test_on_batch(X, y), made_so.test_on_batch(X, y), EXACT)
    assert [event.function.split(".")[-1] for event in trainer.ledger] == ["train", "test"]


def test_loss_weights_of_another_structure() -> None:
    trainer = ts.Trainer(two_outputs(), "sgd", ["mse", "mae"], loss_weights=[1.0, 0.5])
    trainer.train_on_batch(X, [Y, Y])
    with pytest.raises(ts.ArgumentError, match="loss_weights"):
        trainer.loss_weights = [1.0]
    assert trainer.loss_weights == [1.0, 0.5]


def test_frozen_layer() -> None:
    """One trace, which says why; then back to the first program."""
    trainer = lone(mlp, regression)
    trainer.train_on_batch(X, Y)
    layer = trainer.model.get_layer("h")
    layer.trainable = False
    frozen = values_of(layer.weights)
    others = values_of(trainer.model.get_layer("out").weights)
    for _ in range(2):
        trainer.train_on_batch(X, Y)
    assert_same(layer.weights, frozen, 0, 0)
    assert length([host(w) - b for w, b in zip(trainer.model.get_layer("out").weights, others)]) > 0
    assert trainer.trace_count == 2
    assert any("trainable" in change and "'h'" in change for change in trainer.ledger[-1].changes)
    layer.trainable = True
    trainer.train_on_batch(X, Y)
    assert length([host(w) - b for w, b in zip(layer.weights, frozen)]) > 0
    layer.trainable = False
    trainer.train_on_batch(X, Y)
    assert trainer.trace_count == 2


def test_frozen_like_keras() -> None:
    """Keras takes a frozen layer only after it is compiled again; the optimizer is the same."""
    theirs, trainer = twins(mlp, plain)
    for frozen in (False, True, False):
        theirs.get_layer("h").trainable = not frozen
        trainer.model.get_layer("h").trainable = not frozen
        compiled(theirs, **plain())
        for i in range(2):
            x = normal(8, 6, seed=i)
            wanted = theirs.train_on_batch(x, Y, return_dict=True)
            got = trainer.train_on_batch(x, Y)
            theirs.reset_metrics()
            assert_logs(got, wanted, EXACT)
    assert_same(trainer.model.weights, theirs.weights, EXACT, EXACT)
    assert trainer.trace_count == 2


@pytest.mark.slow
def test_frozen_before_fit_of_a_compiled_model() -> None:
    """`trainable` that changed after Keras compiled the model is what counts."""
    model = compiled(mlp(), **regression())
    trainer = ts.Trainer(model)
    trainer.fit(X, Y, batch_size=4, progress=False)
    model.get_layer("h").trainable = False
    frozen, free = values_of(model.get_layer("h").weights), values_of(model.layers[-1].weights)
    trainer.fit(X, Y, batch_size=4, progress=False)
    assert_same(model.get_layer("h").weights, frozen, 0, 0)
    assert not np.array_equal(host(model.layers[-1].kernel), free[0])


def test_batches_and_fit_share_programs() -> None:
    trainer = lone(mlp, regression)
    trainer.fit(X, Y, batch_size=4, epochs=2, validation_data=(X, Y), progress=False)
    traced = trainer.trace_count
    assert traced == 2
    trainer.train_on_batch(X[:4], Y[:4])
    trainer.test_on_batch(X[:4], Y[:4])
    trainer.evaluate(X, Y, batch_size=4)
    trainer.fit(X, Y, batch_size=4, progress=False)
    assert trainer.trace_count == traced
    other = lone(mlp, regression)
    other.train_on_batch(X[:4], Y[:4])
    other.fit(X, Y, batch_size=4, progress=False)
    assert other.trace_count == 1
    other.predict_on_batch(X[:4])
    other.predict(X, batch_size=4)
    assert other.trace_count == 2


def test_fit_after_batches_starts_its_means_anew() -> None:
    """Batches outside `fit` leave no trace in the means of `fit`, nor the other way around."""
    theirs, trainer = twins(mlp, plain)
    theirs.optimizer.learning_rate = trainer.optimizer.learning_rate = 0.0
    wanted = theirs.evaluate(X, Y, batch_size=4, verbose=0, return_dict=True)
    trainer.train_on_batch(3 * X[:4], Y[:4])
    trainer.test_on_batch(3 * X[:4], Y[:4])
    history = trainer.fit(X, Y, batch_size=4, progress=False)
    assert_logs({name: values[0] for name, values in history.history.items()}, wanted, EXACT)
    assert_logs(trainer.evaluate(X, Y, batch_size=4), wanted, EXACT)
    assert_logs(trainer.test_on_batch(X, Y), wanted, EXACT)


def test_weights_set_from_outside() -> None:
    trainer = lone(mlp, regression)
    first = dict(trainer.test_on_batch(X, Y))
    start = trainer.model.get_weights()
    for _ in range(3):
        trainer.train_on_batch(X, Y)
    assert dict(trainer.test_on_batch(X, Y)) != first
    trainer.model.set_weights(start)
    assert dict(trainer.test_on_batch(X, Y)) == first
    assert trainer.trace_count == 2


def test_max_traces() -> None:
    trainer = lone(mlp, regression, max_traces=1)
    trainer.train_on_batch(X, Y)
    before = values_of(trainer.model.weights)
    with pytest.raises(ts.RetraceLimitError):
        trainer.train_on_batch(X[:3], Y[:3])
    assert_same(trainer.model.weights, before, 0, 0)
    trainer.train_on_batch(X, Y)


@pytest.mark.slow
def test_two_thousand_batches_leave_nothing() -> None:
    """Objects that the garbage collector tracks do not pile up with the calls."""
    trainer = lone(mlp, regression)
    for _ in range(50):
        trainer.train_on_batch(X, Y)["loss"]
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(2000):
        logs = trainer.train_on_batch(X, Y)
    assert np.isfinite(logs["loss"])
    del logs
    gc.collect()
    assert len(gc.get_objects()) - before < 100  # caches of the interpreter; a leak is 2000
    assert trainer.trace_count == len(trainer.ledger) == 1
