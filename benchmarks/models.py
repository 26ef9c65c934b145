"""The five networks that the benchmarks train, written once in Keras.

The hand-written steps of the engines start from the weights of these models, in the order of
`model.get_weights()`, so that every contender does the same work from the same weights.
"""

from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
from keras import layers

from benchmarks.settings import BATCH, DROPOUT, HEADS, KEY_SIZE

Batch = tuple[np.ndarray, np.ndarray]


def mlp(*sizes: int) -> keras.Model:
    """A chain of dense layers, ReLU on all but the last; `sizes` starts with the input."""
    first, *hidden, last = sizes
    chain = [layers.Dense(size, activation="relu") for size in hidden]
    return keras.Sequential([layers.Input((first,)), *chain, layers.Dense(last)])


def convnet() -> keras.Model:
    """Two convolutions with batch normalization, then pooling, dropout and a dense layer."""
    return keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(8, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(2),
            layers.Conv2D(16, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dropout(DROPOUT),
            layers.Dense(10),
        ]
    )


def transformer() -> keras.Model:
    """One pre-norm attention block on a sequence of 16 vectors of width 32, then a mean."""
    inputs = layers.Input((16, 32))
    normed = layers.LayerNormalization()(inputs)
    x = inputs + layers.MultiHeadAttention(HEADS, KEY_SIZE)(normed, normed)
    wide = layers.Dense(64, activation="relu")(layers.LayerNormalization()(x))
    x = x + layers.Dense(32)(wide)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


@dataclass(frozen=True)
class Case:
    """A network to train: its name, its Keras builder, and the shapes of one example."""

    name: str
    build: Callable[[], keras.Model]
    x_shape: tuple[int, ...]
    y_shape: tuple[int, ...]

    def model(self) -> keras.Model:
        """Builds the model, with the same initial weights at every call."""
        keras.utils.set_random_seed(0)
        return self.build()

    def batch(self, count: int = 1) -> Batch:
        """Returns one batch of random data, or `count` batches stacked; the same at every call."""
        random = np.random.default_rng(0)
        size = count * BATCH
        x = random.normal(size=(size, *self.x_shape)).astype(np.float32)
        y = random.normal(size=(size, *self.y_shape)).astype(np.float32)
        return x, y


CASES = {
    case.name: case
    for case in (
        Case("MLP 20-10-1", lambda: mlp(20, 10, 1), (20,), (1,)),
        Case("MLP 784-128-10", lambda: mlp(784, 128, 10), (784,), (10,)),
        Case("MLP 64 x 31 layers", lambda: mlp(*[64] * 31, 10), (64,), (10,)),
        Case("convnet", convnet, (28, 28, 1), (10,)),
        Case("transformer", transformer, (16, 32), (10,)),
    )
}
