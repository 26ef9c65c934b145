"""A train_step of one's own on JAX that counts, prints and draws in Python: once, at the trace."""

import random

import jax
import keras
import numpy as np
import witness

random.seed(0)
printed = 0


class Net(keras.Model):
    def __init__(self):
        super().__init__(name="net")
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def loss_of(self, trainable, others, x, y):
        predicted, others = self.stateless_call(trainable, others, x)
        return keras.ops.mean((predicted - y) ** 2), others

    def train_step(self, state, data):
        global printed
        trainable, others, optimizer, metrics = state
        x, y = data
        printed += 1  # <- count
        print("a step")  # <- print
        x = x + random.gauss(0, 0.1)  # <- draw
        gradient_of = jax.value_and_grad(self.loss_of, has_aux=True)
        (loss, others), gradients = gradient_of(trainable, others, x, y)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"loss": loss}, (trainable, others, optimizer, metrics)


witness.keras_steps()
x = np.ones((8, 4), "float32")
y = np.ones((8, 1), "float32")
model = Net()
model(x[:4])
model.compile("sgd")
model.optimizer.build(model.trainable_variables)
model.fit(x, y, batch_size=4, epochs=2, verbose=0)
witness.say(printed=printed)
