"""A train_step of one's own that counts, prints and draws in Python: once, at the trace."""

import random

import keras
import numpy as np
import tensorflow as tf
import witness

random.seed(0)


class Net(keras.Model):
    def __init__(self):
        super().__init__(name="net")
        self.dense = keras.layers.Dense(1)
        self.batches = 0

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        self.batches += 1  # <- count
        print("a step")  # <- print
        x = x + random.gauss(0, 0.1)  # <- draw
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}


witness.keras_steps()
x = np.ones((8, 4), "float32")
y = np.ones((8, 1), "float32")
model = Net()
model(x[:4])
model.compile("sgd")
model.optimizer.build(model.trainable_variables)
model.fit(x, y, batch_size=4, epochs=2, verbose=0)
witness.say(batches=model.batches)
