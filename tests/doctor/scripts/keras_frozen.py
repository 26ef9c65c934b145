"""A layer frozen after compile() and a first fit, without another compile()."""

import keras
import numpy as np
import witness

witness.keras_steps()
x = np.random.default_rng(0).random((8, 4)).astype("float32")
y = x.sum(1, keepdims=True)
model = keras.Sequential(
    [keras.Input((4,)), keras.layers.Dense(3, name="base"), keras.layers.Dense(1)], name="net"
)
model.compile("sgd", "mse")
model.optimizer.build(model.trainable_variables)
model.fit(x, y, batch_size=4, verbose=0)
base = model.get_layer("base")
base.trainable = False  # <- freeze
before = base.get_weights()[0]
try:
    model.fit(x, y, batch_size=4, verbose=0)  # <- fit
    outcome = "moved" if (base.get_weights()[0] != before).any() else "stayed"
except ValueError:
    outcome = "raised"
witness.say(outcome=outcome)
