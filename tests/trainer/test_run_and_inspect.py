"""`Trainer.run` and `Trainer.inspect`: named values of the step, and one batch looked at."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import trainstep as ts

X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 16)
# Two programs of one computation may fuse differently: a few roundings of float32.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}


def model(*, dropout: bool = True) -> Any:
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.BatchNormalization(name="norm")]
    hidden += [keras.layers.Dropout(0.2, seed=1, name="drop")] * dropout
    return keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(8, activation="relu", name="first"),
            *hidden,
            keras.layers.Dense(3, activation="softmax", name="last"),
        ]
    )


def trainer(**options: Any) -> Any:
    return ts.Trainer(
        model(**options), "adam", "sparse_categorical_crossentropy", metrics=["accuracy"]
    )


def state(trained: Any) -> list[Any]:
    variables = [*trained.model.variables, *(v for m in trained.metrics for v in m.variables)]
    return [keras.ops.convert_to_numpy(v.value).copy() for v in variables]


def numpy(x: Any) -> Any:
    return keras.ops.convert_to_numpy(x)


def test_values_come_in_the_structure_of_the_fetches() -> None:
    t = trainer()
    assert float(t.run("loss", X, Y)) > 0
    loss, (norm, outputs) = t.run(["loss", ("gradient_norm", "outputs")], X, Y)
    assert float(norm) > 0
    assert outputs.shape == (16, 3)
    assert float(loss) > 0
    assert set(t.run({"a": "loss"}, X, Y)) == {"a"}


@pytest.mark.slow
def test_nothing_changes_without_update() -> None:
    t = trainer()
    t.train_on_batch(X, Y)
    before = state(t)
    slots = [numpy(v.value).copy() for v in t.optimizer.variables]
    t.run(["loss", "metrics", "gradients", "updates", "activations", "outputs"], X, Y)
    for old, new in zip(before, state(t), strict=True):
        np.testing.assert_array_equal(old, new)
    for old, variable in zip(slots, t.optimizer.variables, strict=True):
        np.testing.assert_array_equal(old, numpy(variable.value))


def test_the_loss_is_that_of_the_next_training_step() -> None:
    t = trainer()
    asked = float(t.run("loss", X, Y))
    assert t.train_on_batch(X, Y)["loss"] == pytest.approx(asked, rel=1e-6)


@pytest.mark.slow
def test_gradients_are_those_of_value_and_grad() -> None:
    t = trainer(dropout=False)
    m = t.model

    def loss_of() -> Any:
        y_pred = m(X, training=True)
        return keras.losses.SparseCategoricalCrossentropy()(Y, y_pred)

    statistics = [numpy(v.value).copy() for v in m.non_trainable_variables]
    _, wanted = ts.value_and_grad(loss_of, m.trainable_variables)()
    for v, old in zip(m.non_trainable_variables, statistics, strict=True):
        v.assign(old)
    found = t.run("gradients", X, Y)
    for variable, gradient in zip(m.trainable_variables, wanted, strict=True):
        np.testing.assert_allclose(numpy(found[variable.path]), numpy(gradient), **TOLERANCE)
    path = m.trainable_variables[0].path
    single = t.run(f"gradients/{path}", X, Y)
    np.testing.assert_allclose(numpy(single), numpy(wanted[0]), **TOLERANCE)
    norm = np.sqrt(sum(np.square(numpy(g)).sum() for g in wanted))
    assert float(t.run("gradient_norm", X, Y)) == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.slow
def test_updates_are_what_an_update_then_does() -> None:
    t = trainer()
    before = {v.path: numpy(v.value).copy() for v in t.model.trainable_variables}
    announced = t.run("updates", X, Y)
    loss = t.run("loss", X, Y, update=True)
    assert float(loss) > 0
    for v in t.model.trainable_variables:
        change = numpy(v.value) - before[v.path]
        np.testing.assert_allclose(numpy(announced[v.path]), change, rtol=1e-4, atol=1e-7)
        assert np.abs(change).max() > 0


def test_an_update_is_the_training_step() -> None:
    one, other = trainer(), trainer()
    for _ in range(3):
        one.train_on_batch(X, Y)
        other.run(["gradients", "metrics"], X, Y, update=True)
    for a, b in zip(one.model.get_weights(), other.model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, **TOLERANCE)


def test_activations_are_what_the_layers_give() -> None:
    t = trainer()
    found = t.run("activations", X, training=False)
    assert list(found) == ["first", "norm", "drop", "last"]
    h = X
    for layer in t.model.layers:
        h = layer(h, training=False) if layer.name in ("norm", "drop") else layer(h)
        np.testing.assert_allclose(numpy(found[layer.name]), numpy(h), **TOLERANCE)
    last = t.run("activations/last", X, training=False)
    np.testing.assert_allclose(numpy(last), numpy(found["last"]), **TOLERANCE)


def test_outputs_need_no_targets_and_a_loss_does() -> None:
    t = trainer()
    assert t.run("outputs", X).shape == (16, 3)
    with pytest.raises(ts.ArgumentError, match="`y` does not fit"):
        t.run("loss", X)


def test_a_set_of_fetches_is_compiled_once() -> None:
    t = trainer()
    for _ in range(3):
        t.run(["loss", "gradient_norm"], X, Y)
        t.run("outputs", X)
    assert t.trace_count == 2


@pytest.mark.parametrize("name", ["los", "gradients/first/kernl", "activations/frist", 3, []])
def test_an_unknown_name_is_refused_with_those_there_are(name: Any) -> None:
    t = trainer()
    with pytest.raises(ts.ArgumentError) as caught:
        t.run(name, X, Y)
    message = str(caught.value)
    assert "`fetches`" in message
    assert "expected:" in message
    assert "'gradient_norm'" in message


def test_a_close_name_is_suggested() -> None:
    with pytest.raises(ts.ArgumentError, match="did you mean 'activations/first'"):
        trainer().run("activations/frist", X, Y)


@pytest.mark.slow
def test_an_inspection_shows_every_layer_and_changes_nothing() -> None:
    t = trainer()
    t.train_on_batch(X, Y)
    before = state(t)
    found = t.inspect(X, Y)
    for old, new in zip(before, state(t), strict=True):
        np.testing.assert_array_equal(old, new)
    assert [layer.name for layer in found.layers] == ["first", "norm", "drop", "last"]
    assert found.first_bad is None
    assert "every number is finite" in str(found)
    assert "first (Dense)" in str(found)
    assert found._repr_html_().startswith("<pre>")
    activations = t.run("activations", X)
    gradients = t.run("gradients", X, Y)
    first = found.layers[0]
    assert first.activation.high == pytest.approx(numpy(activations["first"]).max(), rel=1e-6)
    kernel = [numpy(g) for path, g in gradients.items() if "first" in path]
    norm = np.sqrt(sum(np.square(g).sum() for g in kernel))
    assert first.weight_gradient.norm == pytest.approx(norm, rel=1e-4)
    assert first.gradient.norm > 0
    assert found.layers[2].weight_gradient is None


def test_the_gradient_by_the_last_activation_is_that_of_the_loss() -> None:
    keras.utils.set_random_seed(0)
    m = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, name="only")])
    t = ts.Trainer(m, "sgd", "mse")
    y = np.ones((16, 1), "float32")
    by_hand = 2 * (numpy(m(X)) - y) / 16
    (only,) = t.inspect(X, y).layers
    assert only.gradient.norm == pytest.approx(float(np.linalg.norm(by_hand)), rel=1e-5)


def test_dead_units_are_counted() -> None:
    keras.utils.set_random_seed(0)
    m = keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(4, activation="relu", name="hidden"),
            keras.layers.Dense(1),
        ]
    )
    m.layers[0].bias.assign([-1e6, -1e6, -1e6, 1.0])
    t = ts.Trainer(m, "sgd", "mse")
    assert t.inspect(X, np.ones((16, 1))).layers[0].dead == 0.75


def through(name: str, function: Any, *, start: str = "glorot_uniform") -> Any:
    inputs = keras.Input((4,))
    dense = keras.layers.Dense(3, name="before", use_bias=False, kernel_initializer=start)
    h = keras.layers.Lambda(function, name=name)(dense(inputs))
    return keras.Model(inputs, keras.layers.Dense(1)(h))


def test_the_first_bad_place_is_found_forward() -> None:
    t = ts.Trainer(through("log", keras.ops.log), "sgd", "mse")
    found = t.inspect(X, np.ones((16, 1)))
    assert "layer 'log'" in found.first_bad
    assert "activation" in found.first_bad
    assert "NaN" in found.first_bad
    assert found.first_bad in str(found)


def test_the_first_bad_place_is_found_backward() -> None:
    t = ts.Trainer(through("root", keras.ops.sqrt, start="zeros"), "sgd", "mse")
    found = t.inspect(X, np.ones((16, 1)))
    assert np.isfinite(found.loss)
    assert "gradient by the activation of layer 'before'" in found.first_bad


def test_the_first_bad_place_may_be_the_data_or_a_weight() -> None:
    t = trainer()
    bad = X.copy()
    bad[3, 1] = np.inf
    assert t.inspect(bad, Y).first_bad.startswith("the input `x`")
    kernel = numpy(t.model.layers[0].kernel.value).copy()
    kernel[0, 0] = np.nan
    t.model.layers[0].kernel.assign(kernel)
    assert t.model.layers[0].kernel.path in t.inspect(X, Y).first_bad


@pytest.mark.slow
def test_no_more_is_computed_than_was_asked_for() -> None:
    t = trainer()
    t.train_on_batch(X, Y)
    slots = {v.path for v in t.optimizer.variables}
    t.run("outputs", X, training=False)
    t.run("loss", X, Y)
    for event in list(t.ledger)[-2:]:
        assert not slots & set(event.reads)
        assert not event.writes
