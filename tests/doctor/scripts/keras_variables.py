"""The first lines of any tutorial: nothing is built before fit."""

import keras
import numpy as np
import witness

witness.keras_steps()
x = np.random.default_rng(0).random((8, 4)).astype("float32")
y = x.sum(1, keepdims=True)
model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)], name="net")
model.compile("adam", "mse", metrics=["mae"])
model.fit(x, y, batch_size=4, epochs=2, verbose=0)  # <- fit
witness.say()
