"""Tests of several devices, in float64: what is left of a difference there is rounding alone.

Those marked `devices` run in a process of their own, `TRAINSTEP_DEVICES=4 pytest tests/distribution`:
the number of devices is fixed when the engine starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import keras
import pytest
from keras.src.backend.common import dtypes

from tests.distribution.wide import widened

DEVICES = int(os.environ.get("TRAINSTEP_DEVICES", "0"))

if DEVICES and keras.backend.backend() == "jax":
    import jax

    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_enable_x64", True)
if DEVICES and keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    (processor,) = tf.config.list_physical_devices("CPU")
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(processor, parts)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out the tests of several devices where there is one, and the reverse."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            several = item.get_closest_marker("devices") is not None
            if several and not DEVICES:
                item.add_marker(pytest.mark.skip(reason="needs TRAINSTEP_DEVICES=4"))
            if DEVICES and not several:
                item.add_marker(pytest.mark.skip(reason="needs one device"))


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Computes in float64, also where Keras would take float32 for a float64 and a float32."""
    result_type = widened(dtypes.result_type)
    monkeypatch.setattr(dtypes, "result_type", result_type)
    monkeypatch.setattr("keras.src.backend.result_type", result_type)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
