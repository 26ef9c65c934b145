"""fit, then train_on_batch with a batch of the same size: the data comes in another form."""

import keras
import numpy as np
import witness

witness.keras_steps()
x = np.random.default_rng(0).random((8, 4)).astype("float32")
y = x.sum(1, keepdims=True)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="net")
model.compile("sgd", "mse")
model.optimizer.build(model.trainable_variables)
model.fit(x, y, batch_size=4, verbose=0)
for _ in range(2):
    model.train_on_batch(x[:4], y[:4])  # <- batch
witness.say()
