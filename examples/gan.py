"""A GAN whose two updates are one compiled step, learning a mixture of two Gaussians.

Each update computes gradients by the variables of its own network only. The generator's gradient
flows through the discriminator without changing it, so no `trainable` flag has to be switched. The
updates are plain functions; the `ts.function` that calls both compiles them to one program.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import trainstep as ts

NOISE, BATCH, STEPS = 4, 64, 2000


@dataclass(frozen=True)
class Gan:
    """Two networks, and the function that trains each of them."""

    generator: keras.Model
    discriminator: keras.Model
    train_generator: Callable[[Any], Any]
    train_discriminator: Callable[[Any, Any], Any]


def network(name: str, inputs: int) -> keras.Model:
    hidden = [layers.Dense(20, activation="leaky_relu") for _ in range(2)]
    return keras.Sequential([keras.Input((inputs,)), *hidden, layers.Dense(1)], name=name)


def make() -> Gan:
    generator, discriminator = network("generator", NOISE), network("discriminator", 1)
    by_generator = keras.optimizers.Adam(1e-3, beta_1=0.5)
    by_discriminator = keras.optimizers.Adam(2e-3, beta_1=0.5)
    cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    def train_discriminator(real: Any, noise: Any) -> Any:
        def loss_of() -> Any:
            of_real, of_fake = discriminator(real), discriminator(generator(noise))
            right = cross_entropy(ops.ones_like(of_real), of_real)
            return right + cross_entropy(ops.zeros_like(of_fake), of_fake)

        loss, gradients = ts.value_and_grad(loss_of, discriminator.trainable_variables)()
        by_discriminator.apply(gradients, discriminator.trainable_variables)
        return loss

    def train_generator(noise: Any) -> Any:
        def loss_of() -> Any:
            of_fake = discriminator(generator(noise))
            return cross_entropy(ops.ones_like(of_fake), of_fake)

        loss, gradients = ts.value_and_grad(loss_of, generator.trainable_variables)()
        by_generator.apply(gradients, generator.trainable_variables)
        return loss

    return Gan(generator, discriminator, train_generator, train_discriminator)


def data(numbers: np.random.Generator, count: int) -> np.ndarray:
    """Returns samples, half of them around -1 and half around 2."""
    centres = numbers.choice([-1.0, 2.0], (count, 1))
    return (centres + 0.4 * numbers.standard_normal((count, 1))).astype("float32")


def noise(numbers: np.random.Generator, count: int) -> np.ndarray:
    return numbers.standard_normal((count, NOISE)).astype("float32")


def main() -> tuple[np.ndarray, np.ndarray, int]:
    """Returns samples of the data and of the generator, and the number of traces of the step."""
    keras.utils.set_random_seed(0)
    numbers = np.random.default_rng(0)
    gan = make()
    real, fixed = data(numbers, 2000), noise(numbers, 2000)

    @ts.function
    def step(real: Any, noise: Any, more: Any) -> tuple[Any, Any]:
        return gan.train_discriminator(real, noise), gan.train_generator(more)

    @ts.function
    def generate(noise: Any) -> Any:
        return gan.generator(noise)

    print(f"the data's mean is {real.mean():.2f}, its standard deviation {real.std():.2f}")
    print("step   loss of discriminator, generator   mean   standard deviation")
    for number in range(1, STEPS + 1):
        losses = step(data(numbers, BATCH), noise(numbers, BATCH), noise(numbers, BATCH))
        if number % (STEPS // 5) == 0 or number == 1:
            made = ops.convert_to_numpy(generate(fixed))
            first, second = map(float, losses)
            print(f"{number:4} {first:17.3f} {second:16.3f} {made.mean():9.2f} {made.std():9.2f}")
    print(f"traces of the step with both updates in it: {step.trace_count}")
    return real, made, step.trace_count


if __name__ == "__main__":
    main()
