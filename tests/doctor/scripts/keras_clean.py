"""fit with validation, metrics, dropout, a schedule and callbacks; evaluate and predict; batches
all of one size, everything built before.
"""

import keras
import numpy as np
import witness

keras.utils.set_random_seed(0)
witness.keras_steps()
x = np.random.default_rng(0).random((8, 4)).astype("float32")
y = x.sum(1, keepdims=True)


class Jitter(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x, training=False):
        return x + keras.random.normal((4, 4), seed=self.seeds) if training else x


class Watch(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.losses = []

    def on_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])


layers = [keras.Input((4,)), Jitter(), keras.layers.Dense(4, "relu"), keras.layers.Dropout(0.2)]
model = keras.Sequential([*layers, keras.layers.Dense(1)], name="net")
schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
metrics = [keras.metrics.MeanAbsoluteError(), keras.metrics.RootMeanSquaredError()]
model.compile(keras.optimizers.Adam(schedule), "mse", metrics=metrics)
model.optimizer.build(model.trainable_variables)
watch = Watch()
model.fit(x, y, batch_size=4, epochs=3, verbose=0, validation_data=(x, y), callbacks=[watch])
model.fit(x, y, batch_size=4, epochs=1, verbose=0)
model.evaluate(x, y, batch_size=4, verbose=0)
for _ in range(2):
    model.predict(x, batch_size=4, verbose=0)
witness.say(steps=len(watch.losses))
