"""Keras in float64 throughout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras.src.backend.common import dtypes


def widened(real: Callable[..., Any]) -> Callable[..., str]:
    """Keras's rule of dtypes, but that a float64 and a float32 make a float64."""

    def result_type(*types: Any) -> str:
        is_wide = any("float64" in str(each) for each in types)  # torch's are `torch.float64`
        return "float64" if is_wide else str(real(*types))

    return result_type


def use() -> None:
    """Computes in float64 from now on."""
    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
    dtypes.result_type = keras.src.backend.result_type = widened(dtypes.result_type)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
