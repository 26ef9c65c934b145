"""`graph.of(trainer)`: the parts of a trainer's step, fetched and put together anew.

Tolerances as in `test_training.py`: 1e-6 for linear optimizers, 1e-5 where a gradient's or a
batch's size is divided by; 2e-3 in float16, whose last place is 1e-3.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import trainstep as ts
from tests.helpers import assert_same, host, normal, values_of
from trainstep import graph

LINEAR, ADAPTIVE, HALF = 1e-6, 1e-5, 2e-3
X, Y = normal(8, 3), normal(8, 2, seed=1)


def plain() -> keras.Model:
    keras.utils.set_random_seed(5)
    return keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(4, activation="tanh", name="first"),
            layers.Dense(2, name="last"),
        ]
    )


def rich() -> keras.Model:
    """With what a step changes besides weights, and with a loss that layers add."""
    keras.utils.set_random_seed(5)
    return keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(4, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.1)),
            layers.BatchNormalization(momentum=0.9),
            layers.Dropout(0.5, seed=7),
            layers.Dense(2),
        ]
    )


def half() -> keras.Model:
    """Computes in float16, whose loss is scaled before it is differentiated."""
    keras.utils.set_random_seed(5)
    policy = keras.dtype_policies.DTypePolicy("mixed_float16")
    hidden = layers.Dense(4, activation="tanh", dtype=policy)
    model = keras.Sequential([keras.Input((3,)), hidden, layers.Dense(2, dtype=policy)])
    model.dtype_policy = policy
    return model


def sgd() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.5)


def trainer(build: Any = plain, optimizer: Any = sgd, **options: Any) -> ts.Trainer:
    return ts.Trainer(build(), optimizer(), "mse", metrics=["mae"], **options)


def assert_trained_alike(mine: ts.Trainer, theirs: ts.Trainer, tolerance: float) -> None:
    assert_same(mine.model.variables, theirs.model.variables, rtol=tolerance, atol=tolerance)
    assert_same(mine.optimizer.variables, theirs.optimizer.variables, tolerance, tolerance)


@pytest.mark.parametrize(
    ("build", "optimizer", "options", "tolerance"),
    [
        (plain, keras.optimizers.Adam, {}, ADAPTIVE),
        pytest.param(plain, sgd, {"clip_norm": 0.1}, LINEAR, marks=pytest.mark.slow),
        pytest.param(rich, sgd, {}, ADAPTIVE, marks=pytest.mark.slow),
        pytest.param(plain, sgd, {"accumulate": 2}, LINEAR, marks=pytest.mark.slow),
        pytest.param(half, sgd, {}, HALF, marks=pytest.mark.slow),
    ],
    ids=["adam", "clip_norm", "dropout-and-normalization", "accumulate", "float16"],
)
def test_the_train_operation_is_train_on_batch(
    build: Any, optimizer: Any, options: Any, tolerance: float
) -> None:
    mine, theirs = (trainer(build, optimizer, **options) for _ in range(2))
    parts = graph.of(mine)
    session = graph.Session()

    for step in range(4):
        x, y = normal(8, 3, seed=step), normal(8, 2, seed=step + 100)
        loss, _ = session.run([parts.loss, parts.train], {parts.x: x, parts.y: y})
        logs = theirs.train_on_batch(x, y)
        rtol = max(tolerance, ADAPTIVE)  # a sum over the batch
        np.testing.assert_allclose(loss, logs["loss"], rtol=rtol)

    assert_trained_alike(mine, theirs, tolerance)


def test_what_is_changed_on_the_trainer_counts_at_the_next_run() -> None:
    mine, theirs = (trainer(clip_norm=10.0) for _ in range(2))
    parts = graph.of(mine)
    session = graph.Session()

    for limit, rate in ((10.0, 0.1), (0.05, 0.1), (0.05, 0.3)):
        for each in (mine, theirs):
            each.clip_norm = limit
            each.optimizer.learning_rate = rate
        session.run(parts.train, {parts.x: X, parts.y: Y})
        theirs.train_on_batch(X, Y)

    assert_trained_alike(mine, theirs, LINEAR)


def test_a_model_that_is_not_built_is_told_its_shapes() -> None:
    def build() -> ts.Trainer:
        keras.utils.set_random_seed(5)
        model = keras.Sequential([layers.Dense(4, activation="tanh"), layers.Dense(2)])
        return ts.Trainer(model, sgd(), "mse")

    mine, theirs = build(), build()
    parts = graph.of(mine, x=ts.Spec((None, 3)), y=ts.Spec((None, 2)))
    theirs.model.build((None, 3))
    theirs.model.set_weights(mine.model.get_weights())

    graph.Session().run(parts.train, {parts.x: X, parts.y: Y})
    theirs.train_on_batch(X, Y)

    assert_trained_alike(mine, theirs, LINEAR)


def test_targets_of_a_half_precision_model_keep_their_precision() -> None:
    """Keras computes losses in float32; 70,000 is beyond float16."""
    mine, theirs = trainer(half), trainer(half)
    parts = graph.of(mine)
    targets = np.full((8, 2), 70_000.0, "float32")

    loss = graph.Session().run(parts.loss, {parts.x: X, parts.y: targets})

    np.testing.assert_allclose(loss, theirs.test_on_batch(X, targets)["loss"], rtol=HALF)


def test_gradients_of_a_scaled_loss_are_those_of_the_loss() -> None:
    mine = trainer(half)
    parts = graph.of(mine)
    assert isinstance(mine.optimizer, keras.optimizers.LossScaleOptimizer)

    found = graph.Session().run(parts.gradients, {parts.x: X, parts.y: Y})

    wanted = mine.run("gradients", X, Y)
    assert_same(found, [wanted[v.path] for v in parts.variables], rtol=HALF, atol=HALF)


class OwnLoss(keras.Model):
    """Computes its own loss, from its inputs too."""

    def __init__(self) -> None:
        super().__init__()
        self.out = layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.out(x)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        return ops.mean(ops.square(y - y_pred) * ops.abs(x[:, :1]))


def test_a_model_with_a_loss_of_its_own() -> None:
    model = OwnLoss()
    outputs = host(model(X))
    parts = graph.of(ts.Trainer(model, sgd(), "mse"), x=ts.Spec((None, 3)), y=ts.Spec((None, 2)))
    wanted = np.mean((Y - outputs) ** 2 * np.abs(X[:, :1]))

    loss = graph.Session().run(parts.loss, {parts.x: X, parts.y: Y})

    np.testing.assert_allclose(loss, wanted, rtol=ADAPTIVE)


def test_the_parts_are_those_of_the_step() -> None:
    mine = trainer()
    parts = graph.of(mine)
    variables = mine.model.trainable_variables

    assert [id(v) for v in parts.variables] == [id(v) for v in variables]
    assert len(parts.gradients) == len(variables)
    assert tuple(parts.x.shape) == (None, 3)
    assert tuple(parts.y.shape) == (None, 2)
    assert parts.sample_weight is None
    assert isinstance(parts.train, graph.Operation)

    def by_hand() -> Any:
        return ops.mean(keras.losses.mean_squared_error(Y, mine.model(X)))

    value, wanted = ts.value_and_grad(by_hand, variables)()
    session = graph.Session()
    loss, gradients, outputs = session.run(
        [parts.loss, parts.gradients, parts.outputs], {parts.x: X, parts.y: Y}
    )
    np.testing.assert_allclose(loss, host(value), rtol=ADAPTIVE)
    assert_same(gradients, wanted, rtol=ADAPTIVE, atol=LINEAR)
    np.testing.assert_allclose(outputs, host(mine.model(X)), rtol=ADAPTIVE, atol=LINEAR)
    np.testing.assert_array_equal(session.run(parts.outputs, {parts.x: X}), outputs)  # no label


@pytest.mark.slow
def test_looking_changes_nothing() -> None:
    mine = trainer(rich)
    mine.train_on_batch(X, Y)
    parts = graph.of(mine)
    state = [*mine.model.weights, *mine.optimizer.variables]
    before = values_of(state)

    graph.Session().run([parts.loss, parts.gradients, parts.outputs], {parts.x: X, parts.y: Y})

    assert_same(state, before, rtol=0, atol=0)


def test_own_clipping_is_that_of_the_trainer() -> None:
    mine, theirs = trainer(), trainer(clip_norm=0.1)
    parts = graph.of(mine)
    clipped, norm = graph.clip_by_global_norm(parts.gradients, 0.1)
    train = graph.train.apply_gradients(mine.optimizer, zip(clipped, parts.variables, strict=True))
    session = graph.Session()

    for _ in range(3):
        size, _ = session.run([norm, train], {parts.x: X, parts.y: Y})
        theirs.train_on_batch(X, Y)
        assert size > 0.1

    assert_trained_alike(mine, theirs, LINEAR)


def test_gradient_noise() -> None:
    mine = trainer()
    parts = graph.of(mine)
    noise = [
        graph.random_normal(g.shape, stddev=0.1, seed=i) for i, g in enumerate(parts.gradients)
    ]
    noisy = [g + n for g, n in zip(parts.gradients, noise, strict=True)]
    train = graph.train.apply_gradients(
        keras.optimizers.SGD(0.5), zip(noisy, parts.variables, strict=True)
    )
    before = values_of(parts.variables)
    session = graph.Session()

    _, gradients, added = session.run([train, parts.gradients, noise], {parts.x: X, parts.y: Y})

    wanted = [w - 0.5 * (g + n) for w, g, n in zip(before, gradients, added, strict=True)]
    assert_same(parts.variables, wanted, rtol=LINEAR, atol=LINEAR)
    assert min(np.abs(n).max() for n in added) > 0


def test_a_learning_rate_for_each_layer() -> None:
    mine = trainer()
    parts = graph.of(mine)
    pairs = list(zip(parts.gradients, parts.variables, strict=True))
    rates = {"first": 0.5, "last": 0.125}
    train = graph.group(
        *(
            graph.train.apply_gradients(
                keras.optimizers.SGD(rate), [(g, v) for g, v in pairs if layer in v.path]
            )
            for layer, rate in rates.items()
        )
    )
    before = values_of(parts.variables)

    _, gradients = graph.Session().run([train, parts.gradients], {parts.x: X, parts.y: Y})

    wanted = [
        w - rates["first" if "first" in v.path else "last"] * g
        for w, g, v in zip(before, gradients, parts.variables, strict=True)
    ]
    assert_same(parts.variables, wanted, rtol=LINEAR, atol=LINEAR)


def test_the_loss_with_a_term_of_ones_own() -> None:
    mine = trainer()
    parts = graph.of(mine)
    kernel = mine.model.get_layer("first").kernel
    total = parts.loss + 0.5 * ops.sum(graph.read(kernel) ** 2)
    (gradient,) = graph.gradients(total, [kernel])
    place = [v is kernel for v in parts.variables].index(True)

    found, alone = graph.Session().run([gradient, parts.gradients[place]], {parts.x: X, parts.y: Y})

    np.testing.assert_allclose(found, alone + host(kernel), rtol=ADAPTIVE, atol=LINEAR)


def test_weights_by_sample() -> None:
    mine, theirs = trainer(), trainer()
    parts = graph.of(mine, sample_weight=True)
    weights = np.linspace(0.0, 2.0, 8, dtype="float32")
    session = graph.Session()

    for _ in range(2):
        loss, _ = session.run(
            [parts.loss, parts.train],
            {parts.x: X, parts.y: Y, parts.sample_weight: weights},
        )
        logs = theirs.train_on_batch(X, Y, sample_weight=weights)

    np.testing.assert_allclose(loss, logs["loss"], rtol=ADAPTIVE)
    assert_trained_alike(mine, theirs, LINEAR)


def test_labels_that_are_not_like_the_outputs_are_declared() -> None:
    def classifier() -> ts.Trainer:
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.Input((3,)), layers.Dense(4, activation="softmax")])
        return ts.Trainer(model, sgd(), "sparse_categorical_crossentropy")

    mine, theirs = classifier(), classifier()
    labels = np.array([0, 1, 2, 3, 3, 2, 1, 0], "int32")
    parts = graph.of(mine, y=ts.Spec((None,), "int32"))

    graph.Session().run(parts.train, {parts.x: X, parts.y: labels})
    theirs.train_on_batch(X, labels)

    assert parts.y.dtype == "int32"
    assert_trained_alike(mine, theirs, LINEAR)


@pytest.mark.slow
def test_a_model_with_several_inputs_and_outputs() -> None:
    def build() -> ts.Trainer:
        keras.utils.set_random_seed(5)
        a, b = keras.Input((3,), name="a"), keras.Input((2,), name="b")
        hidden = layers.Concatenate()([layers.Dense(3, activation="tanh")(a), b])
        outputs = {"p": layers.Dense(1, name="p")(hidden), "q": layers.Dense(2, name="q")(hidden)}
        model = keras.Model({"a": a, "b": b}, outputs)
        return ts.Trainer(model, sgd(), {"p": "mse", "q": "mae"})

    mine, theirs = build(), build()
    parts = graph.of(mine)
    x = {"a": X, "b": normal(8, 2, seed=2)}
    y = {"p": normal(8, 1, seed=3), "q": Y}
    feed = {parts.x[k]: v for k, v in x.items()} | {parts.y[k]: v for k, v in y.items()}

    found, _ = graph.Session().run([parts.outputs, parts.train], feed)
    theirs.train_on_batch(x, y)

    assert set(found) == {"p", "q"}
    assert found["q"].shape == (8, 2)
    assert_trained_alike(mine, theirs, LINEAR)


@pytest.mark.slow
def test_the_trainer_and_the_graph_take_turns() -> None:
    mine, theirs = (
        trainer(optimizer=keras.optimizers.Adam),
        trainer(optimizer=keras.optimizers.Adam),
    )
    parts = graph.of(mine)
    session = graph.Session()

    for turn in range(4):
        if turn % 2:
            session.run(parts.train, {parts.x: X, parts.y: Y})
        else:
            mine.train_on_batch(X, Y)
        theirs.train_on_batch(X, Y)

    assert_trained_alike(mine, theirs, ADAPTIVE)


@pytest.mark.slow
def test_batches_of_another_size_train_as_they_do_in_the_trainer() -> None:
    mine, theirs = trainer(), trainer()
    parts = graph.of(mine)
    session = graph.Session()

    for size in (8, 5, 3, 8):
        x, y = normal(size, 3, seed=size), normal(size, 2, seed=size + 100)
        session.run(parts.train, {parts.x: x, parts.y: y})
        theirs.train_on_batch(x, y)

    assert_trained_alike(mine, theirs, LINEAR)


# Targets of one axis


class Squares(keras.losses.Loss):
    """A loss that takes targets as they are."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.mean((y_true - y_pred) ** 2, axis=-1)


def test_targets_of_one_axis_are_taken_as_the_trainer_takes_them() -> None:
    def model() -> keras.Model:
        keras.utils.set_random_seed(5)
        return keras.Sequential([keras.Input((3,)), layers.Dense(1)])

    flat = normal(8, seed=2)
    trainer = ts.Trainer(model(), keras.optimizers.SGD(0.1), "mse")
    parts = graph.of(ts.Trainer(model(), keras.optimizers.SGD(0.1), "mse"))
    with graph.Session() as session:
        _, loss = session.run([parts.train, parts.loss], {parts.x: X, parts.y: flat})
        step = session.make_callable([parts.train, parts.loss], [parts.x, parts.y])
        again = step(X, flat.tolist())[1]

    wanted = [trainer.train_on_batch(X, flat)["loss"] for _ in range(2)]
    np.testing.assert_allclose([loss, again], [float(value) for value in wanted], rtol=ADAPTIVE)
    assert_same(parts.variables, trainer.model.trainable_variables, rtol=LINEAR, atol=LINEAR)


def test_a_loss_that_takes_targets_as_they_are_wants_their_axes() -> None:
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    parts = graph.of(ts.Trainer(model, "sgd", Squares()))

    with pytest.raises(ts.ArgumentError, match=r"(?s)`y` float32\[\?,1\].*float32\[8\]"):
        graph.Session().run(parts.loss, {parts.x: X, parts.y: normal(8)})


def test_gradients_of_another_number_are_refused() -> None:
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    parts = graph.of(ts.Trainer(model, "sgd", "mse"))

    with pytest.raises(ts.ArgumentError, match=r"(?s)`grads`.*2 `variables`.*1.*None"):
        parts.apply_gradients(parts.gradients[:1])
