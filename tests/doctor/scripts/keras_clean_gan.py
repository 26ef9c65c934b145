"""Two models that take turns, batch by batch: each has a function of its own and needs it."""

import keras
import numpy as np
import witness

keras.utils.set_random_seed(0)
witness.keras_steps()


def made(name, units):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units)], name=name)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


generator, critic = made("generator", 4), made("critic", 1)
noise = np.ones((4, 4), "float32")
for _ in range(3):
    fake = generator.predict_on_batch(noise)
    critic.train_on_batch(np.asarray(fake), np.zeros((4, 1), "float32"))
    critic.train_on_batch(noise, np.ones((4, 1), "float32"))
    generator.train_on_batch(noise, noise)
witness.say()
