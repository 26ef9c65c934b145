"""A callback that changes an attribute which a layer reads: the compiled step keeps the old one."""

import keras
import numpy as np
import witness


class Tempered(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.temperature = 1.0

    def call(self, x):
        return x / self.temperature  # <- read


class Cool(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        layer = self.model.layers[0]
        layer.temperature = layer.temperature / 2  # <- change


witness.keras_steps()
x = np.ones((8, 4), "float32")
y = np.ones((8, 1), "float32")
model = keras.Sequential([keras.Input((4,)), Tempered(), keras.layers.Dense(1)], name="net")
model.compile("sgd", "mse")
model.optimizer.build(model.trainable_variables)
model.fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=[Cool()])  # <- fit
witness.say()
