"""A typical Keras script: it trains, and costs more than necessary.

It does not use trainstep. To see where its time goes, on any engine:
`trainstep doctor examples/untuned.py`
"""

import random

import keras
import numpy as np


class Softened(keras.layers.Layer):
    """Divides by a temperature and adds noise."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature

    def call(self, x):
        return x / self.temperature + random.gauss(0.0, 0.01)


keras.utils.set_random_seed(0)
x = np.random.rand(100, 8).astype("float32")
y = x.sum(axis=1, keepdims=True)

softened = Softened(2.0)
model = keras.Sequential(
    [keras.Input((8,)), keras.layers.Dense(16), softened, keras.layers.Dense(1)]
)
model.compile("sgd", "mse")

model.fit(x, y, batch_size=32, epochs=2, verbose=0)  # 32, 32, 32 and 4 rows
softened.temperature = 1.0
model.fit(x, y, batch_size=32, epochs=2, verbose=0)
for rows in (10, 11, 12):
    model.predict(x[:rows], verbose=0)
print("loss", float(model.evaluate(x, y, batch_size=25, verbose=0)))
