"""What several test files share: small data, and arrays on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np


def host(value: Any) -> np.ndarray:
    """A tensor, variable or number as a NumPy array; bfloat16 as float32."""
    array = np.asarray(keras.ops.convert_to_numpy(value))
    return array.astype("float32") if array.dtype.name == "bfloat16" else array


def values_of(variables: Sequence[Any]) -> list[np.ndarray]:
    """Copies of the values of variables."""
    return [np.array(host(v), copy=True) for v in variables]


def normal(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    """Standard normal numbers that are the same in every run and on every engine."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def assert_same(got: Sequence[Any], wanted: Sequence[Any], rtol: float, atol: float) -> None:
    """Compares variables, tensors or arrays one by one; integers must be equal."""
    assert len(got) == len(wanted)
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        a, b = host(a), host(b)
        assert a.shape == b.shape, i
        name = getattr(got[i], "path", i)
        if np.issubdtype(b.dtype, np.floating):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=str(name))
        else:
            np.testing.assert_array_equal(a, b, err_msg=str(name))


class Counted:
    """Counts how often Python runs a function, which a compiled call does not."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.runs = 0

    def __call__(self, *args: Any) -> Any:
        self.runs += 1
        return self.fn(*args)
