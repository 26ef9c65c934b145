"""Makes two devices of the processor, on the engines that have several in a process."""

from __future__ import annotations

import keras


def two() -> None:
    """At the start of a process."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        (processor,) = tf.config.list_physical_devices("CPU")
        parts = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(processor, parts)
    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_num_cpu_devices", 2)
