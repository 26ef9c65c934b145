"""train_on_batch traced inside a tf.function while its metrics are not built: never reset."""

import keras
import numpy as np
import tensorflow as tf
import witness

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", metrics=["mae"])
model.optimizer.build(model.trainable_variables)


@tf.function
def step(x, y):
    witness.mark("step")
    return model.train_on_batch(x, y, return_dict=True)  # <- batch


rng = np.random.default_rng(0)
for scale in (1.0, 10.0, 100.0):
    x = tf.constant(rng.normal(size=(4, 3)), tf.float32)
    logs = step(x, scale * tf.ones((4, 1)))  # <- call
true = float(tf.reduce_mean(tf.abs(scale * tf.ones((4, 1)) - model(x))))
witness.say(wrong=bool(float(logs["mae"]) < 0.7 * true))
