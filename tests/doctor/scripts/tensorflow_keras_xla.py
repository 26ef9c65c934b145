"""fit with jit_compile=True and a short last batch: traced once, compiled by XLA for each size."""

import keras
import numpy as np
import witness

witness.keras_steps()
x = np.random.default_rng(0).random((10, 4)).astype("float32")
y = x.sum(1, keepdims=True)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="net")
model.compile("sgd", "mse", jit_compile=True)
model.optimizer.build(model.trainable_variables)
model.fit(x, y, batch_size=4, epochs=2, verbose=0)  # <- fit
witness.say()
