"""A Keras model and an optimizer that nothing has built yet, first used in a tf.function."""

import keras
import tensorflow as tf
import witness

model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(0.01)


@tf.function
def step(x, y):
    witness.mark("step")
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


for _ in range(3):
    step(tf.ones((4, 5)), tf.ones((4, 1)))  # <- call
witness.say()
