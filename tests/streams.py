"""What the tests of sizes that vary share: batches of many sizes, and a layer that counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import trainstep as ts
from tests.helpers import normal


class Witness(layers.Layer):
    """Counts how often Python runs `call`, which no program of the library can do in silence."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def call(self, x: Any) -> Any:
        self.runs += 1
        return x


class Student:
    """A model, with batch statistics or small, its optimizer and a metric, and a training step.

    The optimizer is SGD: Adam divides a gradient by its own size, so that one near zero, of which
    only the rounding differs, moves a weight by the whole learning rate, one way or the other.
    """

    def __init__(self, norm: bool = True, **options: Any) -> None:
        keras.utils.set_random_seed(7)
        self.witness = Witness()
        hidden = [layers.Dense(5, "tanh"), layers.BatchNormalization(momentum=0.8)] if norm else []
        self.model = keras.Sequential(
            [keras.Input((4,)), *hidden, self.witness, layers.Dense(2, "tanh")]
        )
        self.witness.runs = 0
        self.optimizer = keras.optimizers.SGD(0.1)
        self.error = keras.metrics.MeanAbsoluteError()
        self.step = ts.function(self.train, **options)

    def train(self, x: Any, y: Any) -> Any:
        def loss_of() -> Any:
            outputs = self.model(x, training=True)
            self.error.update_state(y, outputs)
            return ops.mean((outputs - y) ** 2), outputs

        variables = self.model.trainable_variables
        (loss, outputs), gradients = ts.value_and_grad(loss_of, variables, has_aux=True)()
        self.optimizer.apply(gradients, variables)
        return {"loss": loss, "outputs": outputs}

    def run(self, sizes: Iterable[int]) -> list[float]:
        """The losses of a stream of batches of these sizes."""
        return [float(self.step(*batch(n, i))["loss"]) for i, n in enumerate(sizes)]

    @property
    def state(self) -> list[Any]:
        return [*self.model.weights, *self.optimizer.variables, *self.error.variables]


def batch(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows for a `Student`, the same for the same numbers."""
    return normal(n, 4, seed=seed), normal(n, 2, seed=1000 + seed)


def kinds(entries: Any) -> Counter[str]:
    """How many entries of each kind a ledger has."""
    return Counter(event.kind for event in entries)


def ones() -> int:
    """Traces more where a stream has a size of one, which torch records on its own."""
    return int(keras.backend.backend() == "torch")
