"""Corners of the Trainer that once were wrong, each against Keras or against arithmetic."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import trainstep as ts

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(20, 2)).astype("float32")
Y = RANDOM.normal(size=(20, 1)).astype("float32")


def net(width: int = 4) -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(width, "tanh"), keras.layers.Dense(1)]
    )


def numpy(x: Any) -> Any:
    return keras.ops.convert_to_numpy(x)


def test_a_large_batch_may_be_refilled_after_the_call() -> None:
    total = ts.function(lambda x: keras.ops.sum(x))
    buffer = np.ones((1 << 21,), "float32")
    for _ in range(5):
        buffer[:] = 1
        result = total(buffer)
        buffer[:] = 0
        assert float(result) == 1 << 21


def test_an_infinite_limit_clips_nothing() -> None:
    clipped = ts.Trainer(net(), "sgd", "mse", clip_norm=float("inf"))
    plain = ts.Trainer(net(), "sgd", "mse")
    assert clipped.train_on_batch(X, Y)["loss"] == plain.train_on_batch(X, Y)["loss"]
    for a, b in zip(clipped.model.get_weights(), plain.model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ts.ArgumentError, match="`clip_norm`"):
        clipped.clip_norm = -1.0


def test_every_validation_starts_from_the_first_batch() -> None:
    trainer = ts.Trainer(net(), keras.optimizers.SGD(0.0), "mse")
    options = {"epochs": 3, "batch_size": 5, "validation_steps": 2, "progress": False}
    found = trainer.fit(X, Y, validation_data=[X, Y], **options).history["val_loss"]
    assert found == [found[0]] * 3
    wanted = trainer.evaluate(X[:10], Y[:10], batch_size=5)["loss"]
    assert found[0] == pytest.approx(wanted, rel=1e-6)


def test_callbacks_read_single_values_of_several_steps_in_one_call() -> None:
    heard: list[Any] = []

    class Listener(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            logs["mine"] = 3
            heard.append((logs.get("loss"), logs["loss"], dict(logs)["mine"], logs.pop("loss")))

    trainer = ts.Trainer(net(), "sgd", "mse")
    callbacks = [keras.callbacks.TerminateOnNaN(), Listener()]
    trainer.fit(X, Y, batch_size=5, steps_per_call=2, callbacks=callbacks, progress=False)
    assert len(heard) == 4
    for got, item, mine, popped in heard:
        assert isinstance(got, float)
        assert got == item == popped
        assert mine == 3


def test_logs_are_a_dict_in_every_way() -> None:
    logs = ts.Logs({"a": np.float32(1), "b": np.ones(2)})
    assert {**logs, "b": 0} == {"a": 1.0, "b": 0}
    assert logs.setdefault("a", 5) == 1.0
    assert (ts.Logs({"a": np.float32(1)}) != {"a": 1.0}) is False
    assert ts.Logs({"a": np.float32(1)}).popitem() == ("a", 1.0)
    assert isinstance(logs["b"], np.ndarray)
    assert logs.tensors["a"] is not logs["a"]


def test_class_weights_and_sample_weights_of_a_data_set_do_not_mix() -> None:
    trainer = ts.Trainer(net(), "sgd", "mse")
    weights = np.ones(20, "float32")
    with pytest.raises(ts.ArgumentError, match="`class_weight`"):
        trainer.fit((X, Y, weights), class_weight={0: 1.0}, progress=False)
    with pytest.raises(ts.ArgumentError, match="`class_weight`"):
        trainer.fit(iter([(X, Y, weights)]), class_weight={0: 1.0}, progress=False)


def test_classes_may_be_negative() -> None:
    labels = np.where(Y > 0, 1.0, -1.0).astype("float32")
    trainer = ts.Trainer(net(), "sgd", "hinge")
    weights = np.where(labels[:, 0] < 0, 2.0, 1.0).astype("float32")
    wanted = trainer.test_on_batch(X, labels, weights)["loss"]
    found = trainer.test_on_batch(X, labels, class_weight={-1: 2.0})["loss"]
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", "sgd", "adafactor"])
def test_a_model_that_thawed_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model = net(2)
    model.layers[0].trainable = False
    trainer = ts.Trainer(model, name, "mse")
    trainer.train_on_batch(X, Y)
    model.layers[0].trainable = True
    before = model.layers[0].get_weights()[0]
    trainer.train_on_batch(X, Y)
    assert np.abs(model.layers[0].get_weights()[0] - before).max() > 0
    fresh = ts.Trainer(net(2), name, "mse")
    fresh.train_on_batch(X, Y)
    shapes = [tuple(v.shape) for v in trainer.optimizer.variables]
    assert shapes == [tuple(v.shape) for v in fresh.optimizer.variables]
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for a, b in zip(trainer.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(numpy(a.value), numpy(b.value))


def test_recurrent_layers_are_inspected() -> None:
    model = keras.Sequential(
        [keras.Input((3, 2)), keras.layers.SimpleRNN(4, name="rnn"), keras.layers.Dense(1)]
    )
    trainer = ts.Trainer(model, "sgd", "mse")
    x, y = np.ones((5, 3, 2), "float32"), np.ones((5, 1), "float32")
    assert trainer.run("activations/rnn", x).shape == (5, 4)
    found = trainer.inspect(x, y)
    assert found.layers[0].name == "rnn"
    assert found.layers[0].gradient is not None


def test_updates_of_a_model_that_builds_itself() -> None:
    trainer = ts.Trainer(keras.Sequential([keras.layers.Dense(1)]), "sgd", "mse")
    assert len(trainer.run("updates", X, Y)) == 2
    assert len(trainer.run("updates", X, Y)) == 2


def test_variables_of_one_path_are_told_apart() -> None:
    inputs = keras.Input((2,))
    parts = []
    for number in range(2):
        layers = [keras.Input((2,)), keras.layers.Dense(2, name="dense")]
        parts.append(keras.Sequential(layers, name="part"))
        parts[number].name = f"part_{number}"
    model = keras.Model(inputs, parts[1](parts[0](inputs)))
    assert len({v.path for v in model.trainable_variables}) < 4
    trainer = ts.Trainer(model, "sgd", "mse")
    targets = np.ones((20, 2), "float32")
    assert len(trainer.run("gradients", X, targets)) == 4
    norm = float(trainer.run("gradient_norm", X, targets))
    assert trainer.inspect(X, targets).gradient_norm == pytest.approx(norm, rel=1e-5)


def test_a_metric_that_a_layer_updates_is_that_of_the_batch() -> None:
    class Measured(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.mean = keras.metrics.Mean(name="size")

        def call(self, x: Any) -> Any:
            self.mean.update_state(keras.ops.abs(x))
            return x

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), Measured(), keras.layers.Dense(1)])
    trainer = ts.Trainer(model, "sgd", "mse")
    for x in (X[:8], X[8:16]):
        size = trainer.train_on_batch(x, Y[:8])["size"]
        assert size == pytest.approx(float(np.abs(x).mean()), rel=1e-5)


def test_two_trainers_of_one_model_in_two_threads_leave_it_as_it_was() -> None:
    model = net()
    first, second = ts.Trainer(model, "sgd", "mae"), ts.Trainer(model, "sgd", "mse")
    first.train_on_batch(X, Y)
    second.train_on_batch(X, Y)
    loss, optimizer = model._compile_loss, model.optimizer
    threads = [
        threading.Thread(target=lambda t=trainer: [t.reset_metrics() for _ in range(50)])
        for trainer in (first, second)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert model._compile_loss is loss
    assert model.optimizer is optimizer


def test_inputs_are_taken_as_keras_takes_them() -> None:
    a, b = keras.Input((2,), name="in_a"), keras.Input((3,), name="in_b")
    dense = keras.layers.Dense(1)
    model = keras.Model({"a": a, "b": b}, dense(keras.layers.Concatenate()([a, b])))
    trainer = ts.Trainer(model, "sgd", "mse")
    other = np.ones((20, 3), "float32")
    assert np.isfinite(trainer.train_on_batch({"b": other, "a": X}, Y)["loss"])
    with pytest.raises(ts.ArgumentError, match=r"x \(a\)"):
        trainer.train_on_batch({"b": other, "a": other}, Y)


def test_targets_of_some_outputs() -> None:
    inputs = keras.Input((2,))
    model = keras.Model(inputs, {n: keras.layers.Dense(1, name=n)(inputs) for n in ("p", "q")})
    trainer = ts.Trainer(model, "sgd", {"p": "mse"})
    assert np.isfinite(trainer.train_on_batch(X, {"p": Y})["loss"])


def test_a_recipe_takes_what_is_missing_from_the_compiled_model() -> None:
    model = net()
    model.compile(keras.optimizers.SGD(0.5), "mse")
    trainer = ts.Trainer(model, metrics=["mae"])
    assert isinstance(trainer.optimizer, keras.optimizers.SGD)
    assert set(trainer.train_on_batch(X, Y)) == {"loss", "mae"}
    assert trainer.loss_weights is None


def test_tuples_are_inputs_for_predict_and_sparse_arrays_are_refused() -> None:
    inputs = [keras.Input((2,)), keras.Input((2,))]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Add()(inputs)))
    model.compile("sgd", "mse")
    assert ts.accelerate(model).predict((X, X), verbose=0).shape == (20, 1)

    class Sparse:
        shape, dtype = (2, 2), np.dtype("float32")

        def toarray(self) -> Any:
            return np.zeros((2, 2))

    with pytest.raises(ts.ArgumentError, match="toarray"):
        ts.Trainer(net(), "sgd", "mse").fit(Sparse(), Y[:2], progress=False)


def test_stopping_is_heard_without_hooks_on_batches() -> None:
    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = True

    trainer = ts.Trainer(net(), "sgd", "mse")
    trainer.fit(X, Y, batch_size=5, callbacks=[Stop()], progress=False)
    assert int(trainer.optimizer.iterations.value) == 1
