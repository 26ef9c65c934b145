"""A layer that draws from NumPy and a loss that draws from random: once, at the trace."""

import random

import keras
import numpy as np
import witness

np.random.seed(0)


class Noise(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.level = random.random()

    def build(self, shape):
        self.offset = np.random.rand(shape[-1]).astype("float32")

    def call(self, x):
        return x + self.level * np.random.rand(4).astype("float32") + self.offset  # <- numpy


def loss_of(y, predicted):
    return keras.ops.mean((y - predicted) ** 2) * random.uniform(0.5, 1.5)  # <- random


witness.keras_steps()
x = np.ones((8, 4), "float32")
y = np.ones((8, 1), "float32")
model = keras.Sequential([keras.Input((4,)), Noise(), keras.layers.Dense(1)], name="net")
model.compile("sgd", loss_of)
model.optimizer.build(model.trainable_variables)
model.fit(x, y, batch_size=4, epochs=2, verbose=0)
witness.say()
