"""`Trainer.train_on_batch`, `test_on_batch` and `predict_on_batch` give what Keras gives.

Keras's metrics run on from batch to batch; the trainer's values are those of a batch alone, so
Keras's are reset before each. Tolerances as in `test_parity.py`: both sides run the same
operations, fused by different compilers. Seven steps differ by a few float32 roundings; under
optimizers that divide by the gradient's size a rounding of a small gradient weighs more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import trainstep as ts
from tests.helpers import assert_same, host, normal
from tests.twins import (
    Compiling,
    assert_logs,
    assert_twins,
    compiled,
    everything,
    lone,
    mlp,
    regression,
    twins,
)

STEPS = 7  # twice three accumulated, and one more
BATCH = 8
EXACT = 3e-6  # linear optimizers in float32: roundings only
ADAPTIVE = 1e-5  # optimizers that divide by the gradient's size
HALF = 2e-3  # one unit in the last place of float16 is 1e-3

Batch = tuple[Any, ...]


class Penalty(layers.Layer):
    """Passes its input through and adds a loss on it."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.05 * ops.mean(ops.square(x)))
        return x


class OwnLoss(keras.Model):
    """Computes its own loss, from all that Keras hands it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(5, activation="tanh")
        self.out = layers.Dense(2)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.out(self.hidden(x)) * (1.0 if training else 0.5)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        error = ops.mean(ops.square(ops.subtract(y, y_pred)) * ops.abs(x[:, :1]))
        return error if sample_weight is None else error + ops.mean(sample_weight)


class OwnMetrics(OwnLoss):
    """Also changes what the metrics are."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**results, "twice": 2.0 * results["mae"], "widest": ops.max(ops.abs(y_pred))}


class Within(keras.metrics.Metric):
    """The share of numbers that are near their target; two variables of its own."""

    def __init__(self, limit: float = 0.7, name: str = "within") -> None:
        super().__init__(name=name)
        self.limit = limit
        self.near = self.add_variable((), initializer="zeros", name="near")
        self.seen = self.add_variable((), initializer="zeros", dtype="int32", name="seen")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        near = ops.cast(ops.abs(ops.subtract(y_true, y_pred)) < self.limit, "float32")
        if sample_weight is not None:
            near = near * ops.reshape(sample_weight, (-1, 1))
        self.near.assign_add(ops.sum(near))
        self.seen.assign_add(int(np.prod(near.shape)))

    def result(self) -> Any:
        return self.near / ops.maximum(ops.cast(self.seen, "float32"), 1.0)


def deferred() -> keras.Model:
    return keras.Sequential([layers.Dense(5, activation="tanh"), layers.Dense(2)])


def penalized() -> keras.Model:
    l2 = keras.regularizers.L2(0.02)
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(5, activation="tanh", kernel_regularizer=l2),
            Penalty(),
            layers.Dense(2, bias_regularizer=l2, activity_regularizer=l2),
        ]
    )


def random_layers() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh"),
            layers.Dropout(0.4, seed=7),
            layers.BatchNormalization(momentum=0.9),
            layers.Dense(2),
        ]
    )


def classifier() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), layers.Dense(3, activation="softmax")])


def two_by_two(structure: type) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
        h = layers.Concatenate()([layers.Dense(5, activation="tanh")(a), b])
        p = layers.Dense(2, name="p")(h)
        q = layers.Dense(1, activation="sigmoid", name="q")(h)
        if structure is dict:
            return keras.Model({"a": a, "b": b}, {"p": p, "q": q})
        return keras.Model([a, b], [p, q])

    return build


def rows(i: int) -> Batch:
    return normal(BATCH, 6, seed=i), normal(BATCH, 2, seed=1000 + i)


def weighted_rows(i: int) -> Batch:
    return *rows(i), np.abs(normal(BATCH, seed=3000 + i))


def labelled_rows(i: int) -> Batch:
    labels = np.random.default_rng(1000 + i).integers(0, 3, (BATCH,))
    return normal(BATCH, 6, seed=i), labels.astype("int32"), np.abs(normal(BATCH, seed=3000 + i))


def dict_rows(i: int) -> Batch:
    x = {"a": normal(BATCH, 4, seed=i), "b": normal(BATCH, 3, seed=500 + i)}
    label = (normal(BATCH, 1, seed=2000 + i) > 0).astype("float32")
    return x, {"p": normal(BATCH, 2, seed=1000 + i), "q": label}


def list_rows(i: int) -> Batch:
    x, y = dict_rows(i)
    weights = [np.abs(normal(BATCH, seed=s + i)) for s in (3000, 4000)]
    return [x["a"], x["b"]], [y["p"], y["q"]], weights


def huge_rows(i: int) -> Batch:
    """Every third batch overflows float16 under loss scaling."""
    x, y = rows(i)
    return x, y * (1e4 if i % 3 == 1 else 1.0)


def with_optimizer(optimizer: Callable[[], Any]) -> Compiling:
    return lambda: {**regression(), "optimizer": optimizer()}


def sgd(**options: Any) -> Compiling:
    return with_optimizer(lambda: keras.optimizers.SGD(0.05, momentum=0.9, **options))


def adam(**options: Any) -> Compiling:
    return with_optimizer(lambda: keras.optimizers.Adam(0.01, **options))


def absolute(y: Any, p: Any) -> Any:
    return ops.mean(ops.abs(ops.subtract(y, p)), axis=-1)


@dataclass(frozen=True)
class Case:
    """What is trained, and how closely the two sides must agree."""

    name: str
    build: Callable[[], keras.Model] = mlp
    arguments: Compiling = regression
    keras_arguments: Compiling | None = None
    batch: Callable[[int], Batch] = rows
    tolerance: float = EXACT
    ours: dict[str, Any] = field(default_factory=dict)
    only_train: bool = False  # the rest is as in another case


CASES = [
    Case("objects"),
    Case(
        "strings",
        arguments=lambda: {"optimizer": "adam", "loss": "mse", "metrics": ["mae", "mse"]},
        tolerance=ADAPTIVE,
    ),
    Case(
        "functions",
        arguments=lambda: {"optimizer": "sgd", "loss": absolute, "metrics": [absolute]},
        only_train=True,
    ),
    Case("weights per sample", batch=weighted_rows),
    Case(
        "accuracy of labels, plain and weighted",
        classifier,
        lambda: {
            "optimizer": "sgd",
            "loss": "sparse_categorical_crossentropy",
            "metrics": ["accuracy"],
            "weighted_metrics": ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)],
        },
        batch=labelled_rows,
    ),
    Case(
        "own metric",
        arguments=lambda: {
            **regression(),
            "metrics": [Within(), keras.metrics.MeanMetricWrapper(absolute, name="wrapped")],
            "weighted_metrics": [Within(0.3, "weighted")],
        },
        batch=weighted_rows,
    ),
    Case("built by the first batch", deferred, only_train=True),
    Case("added losses and regularizers", penalized),
    Case(
        "added losses alone",
        penalized,
        lambda: {"optimizer": "sgd"},
        batch=lambda i: (rows(i)[0],),
    ),
    Case("own compute_loss", OwnLoss, only_train=True),
    Case("own compute_loss with weights", OwnLoss, batch=weighted_rows),
    Case("own compute_metrics", OwnMetrics),
    Case("dropout and batch-norm", random_layers),
    Case(
        "lists of inputs and outputs",
        two_by_two(list),
        lambda: {
            "optimizer": "sgd",
            "loss": ["mse", keras.losses.BinaryCrossentropy()],
            "loss_weights": [0.3, 2.0],
            "metrics": [["mae"], ["accuracy"]],
            "weighted_metrics": [["mse"], []],
        },
        batch=list_rows,
    ),
    Case(
        "dicts of inputs and outputs",
        two_by_two(dict),
        lambda: {
            "optimizer": "sgd",
            "loss": {"p": "mse", "q": "binary_crossentropy"},
            "loss_weights": {"p": 0.3, "q": 2.0},
            "metrics": {"q": ["accuracy", keras.metrics.AUC(num_thresholds=11, name="auc")]},
        },
        batch=dict_rows,
    ),
    Case("moving average", arguments=sgd(use_ema=True, ema_momentum=0.8), only_train=True),
    Case(
        "moving average that overwrites",
        arguments=sgd(use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3),
        only_train=True,
    ),
    Case("accumulation by Keras", arguments=sgd(gradient_accumulation_steps=3), only_train=True),
    Case(
        "accumulation",
        keras_arguments=sgd(gradient_accumulation_steps=3),
        ours={"accumulate": 3},
        only_train=True,
    ),
    Case(
        "accumulation under Adam",
        arguments=adam(),
        keras_arguments=adam(gradient_accumulation_steps=3),
        ours={"accumulate": 3},
        tolerance=ADAPTIVE,
        only_train=True,
    ),
    Case(
        "clipping",
        keras_arguments=sgd(global_clipnorm=0.1),
        ours={"clip_norm": 0.1},
        only_train=True,
    ),
    Case(
        "accumulation and clipping",
        keras_arguments=sgd(global_clipnorm=0.1, gradient_accumulation_steps=3),
        ours={"clip_norm": 0.1, "accumulate": 3},
        only_train=True,
    ),
    Case(
        "decaying rate and weights",
        arguments=with_optimizer(
            lambda: keras.optimizers.AdamW(
                keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5), weight_decay=0.1
            )
        ),
        tolerance=ADAPTIVE,
        only_train=True,
    ),
]


def compare(case: Case, theirs: keras.Model, trainer: ts.Trainer) -> None:
    """Trains both, and compares each batch's values and then all state."""
    for i in range(STEPS):
        theirs.reset_metrics()
        wanted = theirs.train_on_batch(*case.batch(i), return_dict=True)
        got = trainer.train_on_batch(*case.batch(i))
        assert isinstance(got, ts.Logs)
        assert_logs(got, wanted, case.tolerance)
    assert_twins(trainer, theirs, case.tolerance, slots=case.keras_arguments is None)
    if case.only_train:
        return
    theirs.reset_metrics()
    before = [host(w).copy() for w in trainer.model.weights]
    got = trainer.test_on_batch(*case.batch(99))
    assert_logs(got, theirs.test_on_batch(*case.batch(99), return_dict=True), case.tolerance)
    x = case.batch(99)[0]
    got, wanted = trainer.predict_on_batch(x), theirs.predict_on_batch(x)
    keras.tree.assert_same_structure(got, wanted)
    assert all(keras.ops.is_tensor(t) for t in keras.tree.flatten(got))
    assert_same(keras.tree.flatten(got), keras.tree.flatten(wanted), case.tolerance, case.tolerance)
    assert_same(trainer.model.weights, before, rtol=0, atol=0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))
def test_same_as_keras(case: Case) -> None:
    compare(case, *twins(case.build, case.arguments, case.keras_arguments, **case.ours))


def test_compiled_model_needs_nothing_more() -> None:
    theirs, trainer = twins(mlp, regression)
    own = ts.Trainer(compiled(keras.models.clone_model(theirs), **regression()))
    own.model.set_weights(theirs.get_weights())
    compare(Case("compiled"), theirs, own)
    assert own.optimizer is own.model.optimizer
    assert trainer.optimizer is trainer.model.optimizer


@pytest.fixture
def half_precision() -> Iterator[None]:
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.usefixtures("half_precision")
def test_loss_scaling(clip: float | None) -> None:
    case = Case(
        "half",
        arguments=sgd(),
        keras_arguments=sgd(global_clipnorm=clip),
        batch=huge_rows,
        tolerance=HALF,
        ours={"clip_norm": clip},
    )
    theirs, trainer = twins(mlp, case.arguments, case.keras_arguments, **case.ours)
    assert isinstance(trainer.optimizer, keras.optimizers.LossScaleOptimizer)
    compare(case, theirs, trainer)
    scales = [float(host(o.dynamic_scale)) for o in (trainer.optimizer, theirs.optimizer)]
    assert scales[0] == scales[1] < 2.0**15  # the overflow was seen


WEIGHTS = {0: 0.5, 1: 2.0, 2: 3.0}


@pytest.mark.slow
@pytest.mark.parametrize("labels", ["flat", "column", "one-hot"])
def test_class_weight(labels: str) -> None:
    kind = "categorical_crossentropy" if labels == "one-hot" else "sparse_categorical_crossentropy"
    theirs, trainer = twins(
        classifier,
        lambda: {"optimizer": "sgd", "loss": kind, "weighted_metrics": ["accuracy"]},
    )
    for i in range(3):
        x, y, _ = labelled_rows(i)
        weight = np.array([WEIGHTS[int(label)] for label in y], "float32")
        y = {"flat": y, "column": y[:, None], "one-hot": np.eye(3, dtype="float32")[y]}[labels]
        theirs.reset_metrics()
        wanted = theirs.test_on_batch(x, y, sample_weight=weight, return_dict=True)
        assert_logs(trainer.test_on_batch(x, y, class_weight=WEIGHTS), wanted, EXACT)
        theirs.reset_metrics()
        wanted = theirs.train_on_batch(x, y, class_weight=WEIGHTS, return_dict=True)
        assert_logs(trainer.train_on_batch(x, y, class_weight=WEIGHTS), wanted, EXACT)
    assert_twins(trainer, theirs, EXACT)


def engine_tensor(module: str) -> Callable[[np.ndarray], Any]:
    def make(array: np.ndarray) -> Any:
        if module == "torch":
            return pytest.importorskip("torch").tensor(array)
        if module == "jax":
            return pytest.importorskip("jax.numpy").asarray(array)
        return pytest.importorskip("tensorflow").constant(array)

    return make


def data_frame(array: np.ndarray) -> Any:
    return pytest.importorskip("pandas").DataFrame(array)


KINDS: dict[str, Callable[[np.ndarray], Any]] = {
    "float64": lambda a: a.astype("float64"),
    "float16": lambda a: a.astype("float16"),
    "list": lambda a: a.tolist(),
    "jax": engine_tensor("jax"),
    "tensorflow": engine_tensor("tensorflow"),
    "torch": engine_tensor("torch"),
    "pandas": data_frame,
    "strided": lambda a: np.repeat(a, 2, axis=0)[::2],
    "reversed": lambda a: a[::-1].copy()[::-1],
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
}


@pytest.fixture(scope="module")
def pair() -> tuple[ts.Trainer, ts.Trainer]:
    """Two equal trainers, which every test here leaves equal."""
    return lone(mlp, regression), lone(mlp, regression)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_arrays(kind: str, pair: tuple[ts.Trainer, ts.Trainer]) -> None:
    """Numbers that are the same in float16 give the same as in float32, whatever holds them."""
    trainer, other = pair
    convert = KINDS[kind]
    trainer.model.set_weights(other.model.get_weights())
    for mine, its in zip(trainer.optimizer.variables, other.optimizer.variables, strict=False):
        mine.assign(its)
    for i in range(2):
        x, y, weight = (np.float32(np.float16(a)) for a in weighted_rows(i))
        wanted = other.train_on_batch(x, y, sample_weight=weight)
        got = trainer.train_on_batch(convert(x), convert(y), sample_weight=weight.tolist())
        assert_logs(got, wanted, EXACT)
        assert_logs(trainer.test_on_batch(convert(x), convert(y)), other.test_on_batch(x, y), EXACT)
        got, wanted = trainer.predict_on_batch(convert(x)), other.predict_on_batch(x)
        assert_same([got], [wanted], EXACT, EXACT)
    assert_same(trainer.model.weights, other.model.weights, EXACT, EXACT)


def test_list_of_rows_at_the_first_call() -> None:
    """A list of rows means the same before anything was traced as after."""
    x, y = rows(0)
    wanted = lone(mlp, regression).train_on_batch(x, y)
    got = lone(mlp, regression).train_on_batch(x.tolist(), y.tolist())
    assert_logs(got, wanted, EXACT)


@pytest.mark.slow
def test_batches_of_any_size() -> None:
    """The mean is over the batch at hand, of one sample or many."""
    theirs, trainer = twins(mlp, regression)
    for i, size in enumerate([8, 1, 8]):
        x, y = normal(size, 6, seed=i), normal(size, 2, seed=100 + i)
        theirs.reset_metrics()
        wanted = theirs.train_on_batch(x, y, return_dict=True)
        assert_logs(trainer.train_on_batch(x, y), wanted, EXACT)
        theirs.reset_metrics()
        wanted = theirs.test_on_batch(x, y, return_dict=True)
        assert_logs(trainer.test_on_batch(x, y), wanted, EXACT)
    assert_twins(trainer, theirs, EXACT)


def test_values_are_of_the_batch_alone() -> None:
    """Repeated evaluation of a batch gives the same, and nothing is trained by it."""
    trainer = lone(mlp, regression)
    first, other = rows(0), rows(1)
    wanted = dict(trainer.test_on_batch(*first))
    assert dict(trainer.test_on_batch(*other)) != wanted
    before = everything(trainer)[: len(trainer.model.weights)]
    assert dict(trainer.test_on_batch(*first)) == wanted
    assert_same(everything(trainer)[: len(before)], before, 0, 0)
    logs = trainer.train_on_batch(*first)
    assert all(type(value) is float for value in logs.values())
    assert dict(logs) == logs.copy() == {name: logs[name] for name in logs}
    assert_logs(logs, wanted, EXACT)
