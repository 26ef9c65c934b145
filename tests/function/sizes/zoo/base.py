"""What a case is, and the short words that the other files of the zoo write cases with.

A case builds a small model, a loss of a batch, and data for any number of rows `n` and steps `t`:

    @case("task")
    def dense_regression() -> Built:
        return fit(mlp(), losses.MeanSquaredError(), x=floats(6), y=floats(2))

All is Keras's own, so that one case serves every engine. Random numbers come from generators that
a model or a case owns, because the judge puts their states back before each run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import layers, ops

ENGINES = ("jax", "tensorflow", "torch")

Tensor = Any
Batch = Mapping[str, Tensor]
Rng = np.random.Generator
Array = Callable[[int, int, Rng], np.ndarray]


@dataclass(frozen=True)
class Built:
    """A case that is ready to run.

    Attributes:
        models: What is trained, and built already; gradients are by their trainable variables.
        loss_of: The loss of a batch, a scalar; it also updates the metrics.
        arrays: By name, what makes an array for `n` rows, `t` steps and a random generator.
        metrics: The metrics that `loss_of` updates, with their variables.
        others: Variables that belong to none of them, as the states of random generators.
    """

    models: tuple[Any, ...]
    loss_of: Callable[[Batch], Tensor]
    arrays: Mapping[str, Array]
    metrics: tuple[keras.Metric, ...] = ()
    others: tuple[keras.Variable, ...] = ()

    @property
    def model(self) -> Any:
        """The first model."""
        return self.models[0]

    def data(self, n: int, t: int, rng: Rng) -> dict[str, np.ndarray]:
        """A batch of `n` rows, and `t` steps where the case has any."""
        return {name: array(n, t, rng) for name, array in self.arrays.items()}


@dataclass(frozen=True)
class Case:
    """One row of the zoo.

    Attributes:
        name: Unique in the zoo.
        group: "task", "sequence" or "layer".
        build: Makes everything anew.
        timed: The arrays whose axis 1 is time, and varies.
        expected: By engine, "refused" where one program cannot serve several sizes; else "exact".
        reasons: By engine, a word that has to be in the reason of the refusal.
        unfit: By engine, why the case cannot run there at all.
        at_least: The smallest `n` and `t` for which the case has a meaning.
        rows: The only `n` that the model takes, if there is one.
    """

    name: str
    group: str
    build: Callable[[], Built]
    timed: tuple[str, ...] = ()
    expected: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    unfit: Mapping[str, str] = field(default_factory=dict)
    at_least: tuple[int, int] = (1, 1)
    rows: int | None = None

    @property
    def time(self) -> bool:
        """Whether a time axis varies, besides the batch axis."""
        return bool(self.timed)

    @property
    def engines(self) -> tuple[str, ...]:
        """Where the case runs."""
        return tuple(engine for engine in ENGINES if engine not in self.unfit)

    def expects(self, engine: str) -> str:
        """What the judge should find on an engine."""
        return self.expected.get(engine, "exact")

    def sized(self, sizes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those of `sizes` that the case takes."""
        fit = [(self.rows or n, t) for n, t in sizes]
        return [(n, t) for n, t in fit if n >= self.at_least[0] and t >= self.at_least[1]]


CASES: dict[str, Case] = {}


def add(
    name: str,
    group: str,
    build: Callable[[], Built],
    refused: Mapping[str, str] | None = None,
    **more: Any,
) -> None:
    """Puts a case in the zoo; `refused` has a word of the reason for each engine that refuses."""
    assert name not in CASES, name
    refused = refused or {}
    expected = dict.fromkeys(refused, "refused")
    CASES[name] = Case(name, group, build, expected=expected, reasons=refused, **more)


def case(group: str, **more: Any) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Puts the function that builds a case in the zoo, under its own name."""

    def put(build: Callable[[], Built]) -> Callable[[], Built]:
        add(build.__name__, group, build, **more)
        return build

    return put


# Arrays. A shape names the axes after the batch axis, and "t" stands for the time axis.


def floats(*shape: int | str) -> Array:
    """Normal numbers."""
    return lambda n, t, rng: rng.standard_normal(_sizes(shape, n, t)).astype("float32")


def uniform(*shape: int | str) -> Array:
    """Numbers between 0 and 1."""
    return lambda n, t, rng: rng.random(_sizes(shape, n, t), dtype="float32")


def bits(*shape: int | str) -> Array:
    """Zeros and ones, as floats."""
    return lambda n, t, rng: rng.integers(0, 2, _sizes(shape, n, t)).astype("float32")


def ids(below: int, *shape: int | str) -> Array:
    """Integers from 0."""
    return lambda n, t, rng: rng.integers(0, below, _sizes(shape, n, t)).astype("int32")


def one_hot(classes: int, *shape: int | str) -> Array:
    """Rows with a single one."""
    row = np.eye(classes, dtype="float32")
    return lambda n, t, rng: row[rng.integers(0, classes, _sizes(shape, n, t))]


def tokens(below: int) -> Array:
    """Sentences of differing lengths, filled up with zeros."""

    def make(n: int, t: int, rng: Rng) -> np.ndarray:
        lengths = rng.integers(min(2, t), t + 1, n)
        words = rng.integers(1, below, (n, t)).astype("int32")
        return np.where(np.arange(t) < lengths[:, None], words, 0).astype("int32")

    return make


def _sizes(shape: Sequence[int | str], n: int, t: int) -> tuple[int, ...]:
    return (n, *(t if size == "t" else int(size) for size in shape))


# Models and steps


def chain(shape: Sequence[int | None], *stack: Any, dtype: str = "float32") -> keras.Model:
    """Layers one after another on an input of this shape."""
    return keras.Sequential([layers.Input(shape, dtype=dtype), *stack])


def mlp(outputs: int = 2, *middle: Any, last: str | None = None, **dense: Any) -> keras.Model:
    """Six numbers to a few, with layers in the middle; `dense` goes to the first layer."""
    first = layers.Dense(8, activation="tanh", **dense)
    return chain((6,), first, *middle, layers.Dense(outputs, activation=last))


def fit(
    model: Any, loss: Callable[..., Tensor], metrics: Sequence[keras.Metric] = (), **arrays: Array
) -> Built:
    """The usual step: the model on x, its metrics, a loss against y, and the model's own losses."""

    def loss_of(batch: Batch) -> Tensor:
        predicted = model(batch["x"], training=True)
        for metric in metrics:
            metric.update_state(batch["y"], predicted)
        return loss(batch["y"], predicted) + sum(ops.sum(each) for each in model.losses)

    return Built((model,), loss_of, arrays, tuple(metrics))


def own(model: Any, loss_of: Callable[[Batch], Tensor], **arrays: Array) -> Built:
    """A step with a loss of the case's own making."""
    return Built((model,), loss_of, arrays)


def squared(y: Tensor, predicted: Tensor) -> Tensor:
    """The squared error of each row, unreduced over the batch."""
    return ops.mean(ops.square(y - predicted), axis=-1)


def sparse() -> keras.Loss:
    """The loss of class ids and logits."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
