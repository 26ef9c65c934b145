"""Validation inside fit, over six rows four at a time, while the training batches are all alike."""

import keras
import numpy as np
import witness

witness.keras_steps()
x = np.random.default_rng(0).random((8, 4)).astype("float32")
y = x.sum(1, keepdims=True)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="net")
model.compile("sgd", "mse", metrics=[keras.metrics.MeanAbsoluteError()])
model.optimizer.build(model.trainable_variables)
data = (x[:6], y[:6])
model.fit(x, y, batch_size=4, epochs=2, verbose=0, validation_data=data)  # <- fit
witness.say()
