"""predict with as many rows as happen to arrive."""

import keras
import numpy as np
import witness

witness.keras_steps()
x = np.ones((8, 4), "float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="net")
for rows in (5, 6, 7, 5):
    model.predict(x[:rows], verbose=0)  # <- predict
witness.say()
