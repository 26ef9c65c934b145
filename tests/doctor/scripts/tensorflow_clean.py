"""A training loop as it should be: built first, one trace, random numbers of TensorFlow's own,
a schedule, metrics, a list that lives in the trace, and TensorFlow's print.
"""

import random
import time

import keras
import numpy as np
import tensorflow as tf
import witness

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((4,)),
        keras.layers.Dense(8, "relu"),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(1),
    ]
)
schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.9)
optimizer = keras.optimizers.Adam(schedule)
optimizer.build(model.trainable_variables)
mae = keras.metrics.MeanAbsoluteError()
scale = tf.Variable(1.0)


@tf.function
def train_step(x, y):
    witness.mark("train_step")
    noise = tf.random.normal(tf.shape(x), stddev=0.01)
    losses = []
    with tf.GradientTape() as tape:
        predicted = model(x + noise, training=True)
        losses.append(tf.reduce_mean((predicted - y) ** 2))
        losses.append(scale * tf.reduce_mean(tf.abs(predicted)))
        loss = tf.add_n(losses)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    mae.update_state(y, predicted)
    if loss > 1e9:
        tf.print("diverged", loss)
    return loss


history = []
for epoch in range(3):
    started = time.time()
    for _ in range(2):
        x = np.random.rand(8, 4).astype("float32")
        history.append(float(train_step(x, x.sum(1, keepdims=True))))
    scale.assign(random.random())
    mae.reset_state()
    assert time.time() >= started
witness.say(finite=bool(np.isfinite(history).all()))
