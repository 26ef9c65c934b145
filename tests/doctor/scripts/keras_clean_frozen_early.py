"""A layer frozen after compile() but before the first fit: the trace heeds it, nothing is wrong."""

import keras
import numpy as np
import witness

witness.keras_steps()
x = np.random.default_rng(0).random((8, 4)).astype("float32")
y = x.sum(1, keepdims=True)
base = keras.layers.Dense(3)
model = keras.Sequential([keras.Input((4,)), base, keras.layers.Dense(1)], name="net")
model.compile("sgd", "mse")
base.trainable = False
before = base.get_weights()[0]
for _ in range(2):
    model.fit(x, y, batch_size=4, verbose=0)
witness.say(moved=bool((base.get_weights()[0] != before).any()))
