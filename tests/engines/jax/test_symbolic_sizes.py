"""Sizes that are symbols while a step is traced on JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from keras import ops

import trainstep as ts

SHAPES: dict[str, Callable[[Any], Any]] = {
    "of an array": lambda x: x.shape,
    "of Keras": ops.shape,
    "of NumPy": np.shape,
    "of jax.numpy": jnp.shape,
    "of a struct": lambda x: jax.ShapeDtypeStruct(jnp.shape(x), "float32").shape,
    "of an evaluated shape": lambda x: jax.eval_shape(ops.tanh, x).shape,
    "of a type": lambda x: jax.typeof(x).shape,
    "of a result": lambda x: ops.tanh(x).shape,
}


@pytest.mark.filterwarnings("ignore::trainstep.SizesWarning")
@pytest.mark.parametrize("shape_of", SHAPES.values(), ids=SHAPES)
def test_a_shape_that_is_looked_up_is_that_of_the_call(shape_of: Callable[[Any], Any]) -> None:
    """Since Python 3.14 a tuple remembers the hash that JAX has asked for."""

    @ts.function(shapes="bucket")
    def step(x: Any) -> Any:
        return ops.sum(x) * {(4, 2): 2.0}.get(shape_of(x), 1.0)

    for n in (3, 5, 4, 6, 4):
        assert float(step(np.ones((n, 2), "float32"))) == 2 * n * (2 if n == 4 else 1)
