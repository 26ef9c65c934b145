"""What is wrong with a call is said before anything runs, and nothing has changed afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import trainstep as ts
from tests.helpers import assert_same, normal, values_of
from tests.twins import compiled, everything, lone, mlp, regression

X, Y = normal(8, 6, seed=1), normal(8, 2, seed=2)
NAN = np.where(np.arange(8)[:, None] == 3, np.float32("nan"), X)


def classifier() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), layers.Dense(3, activation="softmax")])


def classification() -> dict[str, Any]:
    return {"optimizer": "sgd", "loss": "sparse_categorical_crossentropy"}


def two_outputs() -> keras.Model:
    x = keras.Input((6,))
    return keras.Model(x, [layers.Dense(2, name="p")(x), layers.Dense(2, name="q")(x)])


def two_losses() -> dict[str, Any]:
    return {"optimizer": "sgd", "loss": ["mse", "mae"]}


@dataclass(frozen=True)
class Wrong:
    """Arguments that do not fit, and the one that the message must name."""

    name: str
    argument: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def wrong(name: str, argument: str, *arguments: Any, **options: Any) -> Wrong:
    return Wrong(name, argument, arguments, options)


BATCHES = [
    wrong("fewer targets", "y", X, Y[:5]),
    wrong("more targets", "y", X[:5], Y),
    wrong("fewer weights", "sample_weight", X, Y, np.ones(5, "float32")),
    wrong("no rows", "x", X[:0], Y[:0]),
    wrong("rank of x too low", "x", X[:, 0], Y),
    wrong("rank of x too high", "x", X[:, None, :], Y),
    wrong("other features", "x", X[:, :4], Y),
    wrong("a scalar", "x", 3.0, Y),
    wrong("none", "x", None, Y),
    wrong("two targets for one output", "y", X, [Y, Y]),
    wrong("two inputs for one", "x", [X, X], Y),
    wrong("nan in x", "x", NAN, Y),
    wrong("nan in y", "y", X, np.where(np.arange(8)[:, None] == 3, np.float32("nan"), Y)),
    wrong("objects", "x", X.astype(object), Y),
    wrong("objects in y", "y", X, np.array([None] * 8, dtype=object)),
    wrong("strings", "y", X, np.array(["cat", "dog"] * 4)),
    wrong("strings in x", "x", np.array([["a"] * 6] * 8), Y),
    wrong("no targets", "y", X),
    wrong("both weights", "class_weight", X, Y, np.ones(8, "float32"), {0: 1.0, 1: 2.0}),
]


def assert_says(error: ts.ArgumentError, argument: str) -> None:
    """The argument, what was expected, what came, and the cure, each on its line."""
    text = str(error)
    assert f"`{argument}`" in text or f"`{argument}[" in text, text
    lines = [line.strip() for line in text.splitlines()]
    for start in ("expected:", "got:", "to fix:"):
        found = [line for line in lines if line.startswith(start)]
        assert len(found) == 1, text
        assert len(found[0]) > len(start) + 3, text


@pytest.fixture(scope="module")
def fresh() -> ts.Trainer:
    """One that never trained: the optimizer has no slots yet. No test here may change it."""
    return lone(mlp, regression)


@pytest.fixture(scope="module")
def used() -> ts.Trainer:
    trainer = lone(mlp, regression)
    trainer.train_on_batch(X, Y)
    trainer.test_on_batch(X, Y)
    return trainer


@pytest.mark.parametrize("case", BATCHES, ids=lambda case: case.name.replace(" ", "_"))
def test_wrong_batches(case: Wrong, fresh: ts.Trainer, used: ts.Trainer) -> None:
    """Only the first batch of a kind is searched for NaN."""
    for trainer in [fresh] if "nan" in case.name else [fresh, used]:
        before = everything(trainer)
        for call in (trainer.train_on_batch, trainer.test_on_batch):
            with pytest.raises(ts.ArgumentError) as caught:
                call(*case.arguments, **case.options)
            assert_says(caught.value, case.argument)
        assert_same(everything(trainer), before, 0, 0)
    assert used.trace_count == 2
    assert np.isfinite(used.train_on_batch(X, Y)["loss"])  # and all goes on


FITS = [
    wrong("fewer targets", "y", X, Y[:5]),
    wrong("fewer weights", "sample_weight", X, Y, sample_weight=np.ones(5, "float32")),
    wrong("no rows", "x", X[:0], Y[:0]),
    wrong("rank of x", "x", X[:, 0], Y),
    wrong("nan", "x", NAN, Y),
    wrong("strings", "y", X, np.array(["cat", "dog"] * 4)),
    wrong("no targets", "y", X),
    wrong(
        "both weights", "class_weight", X, Y, sample_weight=np.ones(8, "float32"),
        class_weight={0: 1.0, 1: 1.0},
    ),
    wrong("empty generator", "x", lambda: iter(())),
    wrong("split of all", "validation_split", X, Y, validation_split=1.0),
    wrong("batch of none", "batch_size", X, Y, batch_size=0),
    wrong("no step per call", "steps_per_call", X, Y, steps_per_call=0),
]  # fmt: skip


@pytest.mark.parametrize("case", FITS, ids=lambda case: case.name.replace(" ", "_"))
def test_wrong_fits(case: Wrong) -> None:
    trainer = lone(mlp, regression)
    before = everything(trainer)
    with pytest.raises(ts.ArgumentError) as caught:
        trainer.fit(*case.arguments, progress=False, **case.options)
    assert_says(caught.value, case.argument)
    assert_same(everything(trainer), before, 0, 0)


def nothing() -> Iterator[Any]:
    yield from ()


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_generator_of_nothing(call: str) -> None:
    trainer = lone(mlp, regression)
    trainer.train_on_batch(X, Y)
    before = everything(trainer)[: len(trainer.model.variables)]
    with pytest.raises(ts.ArgumentError) as caught:
        getattr(trainer, call)(nothing(), progress=False)
    assert_says(caught.value, "x")
    assert_same(everything(trainer)[: len(before)], before, 0, 0)


def test_number_of_outputs() -> None:
    trainer = lone(two_outputs, two_losses)
    before = everything(trainer)
    for y in (Y, [Y], [Y, Y, Y], {"p": Y}):
        with pytest.raises(ts.ArgumentError) as caught:
            trainer.train_on_batch(X, y)
        assert_says(caught.value, "y")
    with pytest.raises(ts.ArgumentError) as caught:
        trainer.train_on_batch(X, [Y, Y[:3]])
    assert_says(caught.value, "y")
    assert_same(everything(trainer), before, 0, 0)
    trainer.train_on_batch(X, [Y, Y])


def test_string_labels_of_a_classifier() -> None:
    trainer = lone(classifier, classification)
    before = everything(trainer)
    for labels in (np.array(["cat", "dog"] * 4), ["cat", "dog"] * 4):
        with pytest.raises(ts.ArgumentError) as caught:
            trainer.train_on_batch(X, labels)
        assert_says(caught.value, "y")
    assert_same(everything(trainer), before, 0, 0)


def test_values_are_not_searched_if_told_so() -> None:
    trainer = lone(mlp, regression, check_values=False)
    assert np.isnan(trainer.train_on_batch(NAN, Y)["loss"])


class Own(keras.Model):
    """Has a train_step of its own, which a trainer cannot replace unseen."""

    def __init__(self) -> None:
        super().__init__()
        self.out = layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.out(x)

    def train_step(self, *args: Any) -> Any:
        return super().train_step(*args)


MAKINGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "a function": ("model", lambda: ts.Trainer(lambda x: x, "sgd", "mse")),
    "a layer": ("model", lambda: ts.Trainer(layers.Dense(2), "sgd", "mse")),
    "none": ("model", lambda: ts.Trainer(None)),
    "not compiled": ("loss", lambda: ts.Trainer(mlp())),
    "own train_step": ("model", lambda: ts.Trainer(Own(), "sgd", "mse")),
    "negative limit": ("clip_norm", lambda: ts.Trainer(mlp(), "sgd", "mse", clip_norm=-1.0)),
    "no batches": ("accumulate", lambda: ts.Trainer(mlp(), "sgd", "mse", accumulate=0)),
}


@pytest.mark.parametrize("name", MAKINGS)
def test_wrong_trainers(name: str) -> None:
    argument, make = MAKINGS[name]
    with pytest.raises(ts.ArgumentError) as caught:
        make()
    assert_says(caught.value, argument)


def test_error_is_one_of_this_library() -> None:
    trainer = ts.Trainer(compiled(mlp(), **regression()))
    with pytest.raises(ts.TrainstepError):
        trainer.train_on_batch(X, Y[:3])
    assert issubclass(ts.ArgumentError, ts.TrainstepError)


def test_error_in_the_middle_of_fit_leaves_a_completed_step() -> None:
    """A wrong batch stops `fit`; the weights are those after the batches before it."""
    trainer, other = lone(mlp, regression), lone(mlp, regression)

    def batches() -> Iterator[Any]:
        yield X[:4], Y[:4]
        yield X[4:], Y[4:]
        yield X[:4], Y[:3]

    with pytest.raises(ts.ArgumentError) as caught:
        trainer.fit(batches(), progress=False)
    assert_says(caught.value, "y")
    other.train_on_batch(X[:4], Y[:4])
    other.train_on_batch(X[4:], Y[4:])
    assert_same(trainer.model.weights, other.model.weights, 1e-6, 1e-6)
    assert_same(trainer.optimizer.variables, other.optimizer.variables, 1e-6, 1e-6)


@pytest.mark.parametrize(
    ("y", "came", "cure"),
    [
        (np.array(["cat", "dog"] * 4), "an array of strings", "return_inverse=True"),
        (np.array([None] * 8, dtype=object), "an array of dtype object", "one dtype"),
    ],
)
def test_what_no_engine_computes_with_has_a_cure_of_its_own(y: Any, came: str, cure: str) -> None:
    with pytest.raises(ts.ArgumentError) as caught:
        lone(mlp, regression).train_on_batch(X, y)
    assert came in str(caught.value)
    assert cure in str(caught.value)


class Wrapped(keras.Model):
    """A model that Keras takes for built when it was only told a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.dense(x)


def test_a_model_whose_layers_are_not_built_yet_is_not_one_without_weights() -> None:
    model = Wrapped()
    model.build((None, 6))
    trainer = ts.Trainer(model, **regression())
    assert np.isfinite(trainer.train_on_batch(X, Y)["loss"])
    assert len(model.trainable_variables) == 2


def test_a_model_that_is_frozen_has_nothing_to_train() -> None:
    trainer = lone(mlp, regression)
    trainer.model.trainable = False
    weights = trainer.model.variables
    before = values_of(weights)
    with pytest.raises(ts.GradientError, match="no trainable weights"):
        trainer.train_on_batch(X, Y)
    assert_same(weights, before, 0, 0)
    trainer.model.trainable = True
    assert np.isfinite(trainer.train_on_batch(X, Y)["loss"])
