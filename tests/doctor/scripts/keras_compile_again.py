"""compile() before every round, to set another learning rate: each makes a new train function."""

import keras
import numpy as np
import witness

witness.keras_steps()
x = np.random.default_rng(0).random((8, 4)).astype("float32")
y = x.sum(1, keepdims=True)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="net")
for rate in (0.1, 0.01, 0.001):
    model.compile(keras.optimizers.SGD(rate), "mse")  # <- compile
    model.optimizer.build(model.trainable_variables)
    model.fit(x, y, batch_size=4, epochs=2, verbose=0)  # <- fit
witness.say()
