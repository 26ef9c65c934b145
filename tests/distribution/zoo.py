"""Models of many kinds: `zoo.py DIRECTORY STRATEGY`; the first process saves their states."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import parts
import wide
from keras import layers

import trainstep as ts
from trainstep import _engines

parts.two()
wide.use()
directory, kind = sys.argv[1:]
me = ts.initialize(heartbeat=30.0)
rng = np.random.default_rng(0)
ROWS = 13
Case = tuple[Any, list[Any], list[Any], dict[str, Any]]


def images() -> Case:
    model = keras.Sequential(
        [
            layers.Input((8, 8, 2)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.BatchNormalization(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3, activation="softmax"),
        ]
    )
    labels = rng.integers(0, 3, ROWS)
    how = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}
    return model, [rng.normal(size=(ROWS, 8, 8, 2))], [labels], how


def words() -> Case:
    """Masked, which torch cannot record: every process computes the whole."""
    model = keras.Sequential(
        [
            layers.Input((5,), dtype="int32"),
            layers.Embedding(10, 6, mask_zero=True),
            layers.GRU(4),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    targets = rng.integers(0, 2, (ROWS, 1))
    how = {"loss": "binary_crossentropy", "metrics": ["AUC"], "clip_norm": 0.1}
    return model, [rng.integers(0, 10, (ROWS, 5))], [targets], how


def attention() -> Case:
    inputs = layers.Input((6, 4))
    # Not `MultiHeadAttention`, which JAX computes in float32.
    seen = layers.Attention()([layers.Dense(4)(inputs), layers.Dense(4)(inputs)])
    hidden = layers.Flatten()(layers.LayerNormalization()(seen + inputs))
    model = keras.Model(inputs, layers.Dense(2)(hidden))
    how = {"loss": "huber", "accumulate": 2}
    return model, [rng.normal(size=(ROWS, 6, 4))], [rng.normal(size=(ROWS, 2))], how


def several() -> Case:
    a, b = layers.Input((3,), name="a"), layers.Input((2,), name="b")
    hidden = layers.Dense(5, activation="gelu", activity_regularizer="l2")(
        layers.Concatenate()([a, b])
    )
    model = keras.Model([a, b], [layers.Dense(1)(hidden), layers.Dense(2)(hidden)])
    how = {"loss": ["mse", "mae"], "loss_weights": [1.0, 0.5], "nan_policy": "skip"}
    x = [rng.normal(size=(ROWS, 3)), rng.normal(size=(ROWS, 2))]
    return model, x, [rng.normal(size=(ROWS, 1)), rng.normal(size=(ROWS, 2))], how


def numbers(make: Callable[[], Case]) -> Iterator[Any]:
    keras.utils.set_random_seed(0)
    model, x, y, how = make()
    optimizer = keras.optimizers.Adam(1e-2)
    trainer = ts.Trainer(model, optimizer=optimizer, strategy=getattr(ts, kind)(), **how)

    def first(arrays: list[Any], count: int) -> Any:
        cut = [each[:count] for each in arrays]
        return cut if len(cut) > 1 else cut[0]

    for count in (ROWS, 12, 1, ROWS):
        yield from dict(trainer.train_on_batch(first(x, count), first(y, count))).values()
    whole = first(x, ROWS), first(y, ROWS)
    trainer.fit(*whole, epochs=1, batch_size=5, progress=False)
    yield trainer.run("gradient_norm", *whole)
    yield from map(_engines.current().gather, (*model.variables, *optimizer.variables))


found = [
    np.ravel(keras.ops.convert_to_numpy(each))
    for make in (images, words, attention, several)
    for each in numbers(make)
]
if me.is_first:
    np.save(f"{directory}/state.npy", np.concatenate([each.astype("float64") for each in found]))
