"""Tensors without inputs: placeholders, variables, constants, random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from trainstep._common.errors import ArgumentError
from trainstep.graph._tensors import NodeOperation, Tensor


class _Placeholder(NodeOperation):
    kind = "placeholder"
    is_fed = True

    def call(self) -> Any:  # pragma: no cover: the plan checks the feeds first
        raise RuntimeError("a placeholder has no value")


def placeholder(dtype: Any, shape: Sequence[int | None], name: str | None = None) -> Tensor:
    """Makes a tensor whose value every run feeds.

    Args:
        dtype: Its dtype, as a string or a NumPy dtype.
        shape: One entry per axis; None for any size.
        name: Its name, usable in fetches and feeds.

    Example:
        >>> from trainstep import graph
        >>> x = graph.placeholder("float32", [None, 3], name="x")
        >>> y = 2 * x
        >>> graph.Session().run(y, {x: [[1.0, 2.0, 3.0]]}).tolist()
        [[2.0, 4.0, 6.0]]
    """
    if shape is None:
        raise ArgumentError(
            "graph.placeholder",
            "shape",
            "one entry per axis, None for any size",
            "None, which leaves the number of axes unknown",
            "give one entry per axis: `[None, None]` for a matrix of any size",
        )
    try:
        spec = keras.KerasTensor(tuple(shape), _dtype(dtype))
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            "graph.placeholder",
            "dtype, shape",
            'a dtype such as "float32", and sizes or None, one for each axis',
            f"{dtype!r}, {shape!r}",
            f"placeholder(dtype, shape): {error}",
        ) from None
    (made,) = _Placeholder().make_outputs((), [spec], name)
    return made  # type: ignore[no-any-return]


def _dtype(dtype: Any) -> str:
    return str(keras.backend.standardize_dtype(getattr(dtype, "as_numpy_dtype", dtype)))


class Read(NodeOperation):
    """Reads a Keras variable."""

    kind = "variable"
    is_reread = True

    def __init__(self, variable: Any) -> None:
        super().__init__()
        self.variable = variable

    def call(self) -> Any:
        return ops.convert_to_tensor(self.variable.value)


class _Constant(NodeOperation):
    kind = "constant"

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    def call(self) -> Any:
        return ops.convert_to_tensor(self._value)


def constant(value: Any, dtype: Any = None, name: str | None = None) -> Tensor:
    """Makes a tensor with a fixed value.

    Example:
        >>> from trainstep import graph
        >>> graph.Session().run(graph.constant([1.0, 2.0]) * 3).tolist()
        [3.0, 6.0]
    """
    array = checked_array(
        value, None if dtype is None else _dtype(dtype), "graph.constant", "value"
    )
    return constant_from_array(array, name)


def constant_from_array(array: Any, name: str | None = None) -> Tensor:
    """Makes a tensor from a NumPy array."""
    (made,) = _Constant(array).make_outputs((), [array], name)
    return made  # type: ignore[no-any-return]


def checked_array(value: Any, dtype: str | None, function: str, argument: str) -> Any:
    """Converts a value to an array, or raises the error of the user's call."""
    try:
        return as_array(value, dtype)
    except ArgumentError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(
            function,
            argument,
            "a tensor, a variable, or a value that converts to an array of numbers",
            "None" if value is None else f"a {type(value).__name__}",
            "pass a number, an array or a tensor of the graph",
        ) from error


def as_array(value: Any, dtype: str | None = None) -> Any:
    """Converts a value to an array; without a dtype, numbers get Keras's default dtype."""
    if dtype is None and not isinstance(value, np.ndarray):
        plain = not hasattr(value, "dtype")
        value = np.asarray(value) if plain else value
        if plain and value.dtype.kind not in "biufc":
            raise TypeError("no numbers")  # the engines' own errors differ
        dtype = "int32" if plain and value.dtype.kind == "i" else None
    if dtype is None and getattr(value, "dtype", None) == np.float64:
        dtype = keras.config.floatx()
    array = ops.convert_to_numpy(ops.convert_to_tensor(value, dtype))
    got = np.asarray(ops.convert_to_numpy(value) if hasattr(value, "dtype") else value)
    if got.dtype.kind in "iu" and array.dtype.kind in "iu" and (got != array).any():
        raise ArgumentError(
            "graph", "value", f"numbers in the range of {array.dtype}", repr(value), "use floats"
        )
    return array


class _Random(NodeOperation):
    kind = "random"
    is_random = True

    def __init__(self, draw: Callable[..., Any], args: Sequence[Any], seed: Any) -> None:
        super().__init__()
        self._draw, self._args = draw, args
        own = isinstance(seed, keras.random.SeedGenerator)
        self._seed = seed if own else keras.random.SeedGenerator(seed)

    def call(self) -> Any:
        return self._draw(*self._args, seed=self._seed)


def _random_tensor(
    draw: Callable[..., Any], args: Sequence[Any], dtype: Any, seed: Any, name: str | None
) -> Tensor:
    dtype = keras.config.floatx() if dtype is None else _dtype(dtype)
    shape, *limits = args
    spec = keras.KerasTensor(tuple(shape), dtype)
    (made,) = _Random(draw, [spec.shape, *limits, dtype], seed).make_outputs((), [spec], name)
    return made  # type: ignore[no-any-return]


def random_normal(  # noqa: PLR0917  # as in TensorFlow 1
    shape: Sequence[int],
    mean: float = 0.0,
    stddev: float = 1.0,
    dtype: Any = None,
    seed: Any = None,
    name: str | None = None,
) -> Tensor:
    """Makes a tensor of normal random numbers, drawn at every run.

    Example:
        >>> from trainstep import graph
        >>> noise, session = graph.random_normal([3], seed=1), graph.Session()
        >>> bool((session.run(noise) == session.run(noise)).all())
        False
    """
    return _random_tensor(keras.random.normal, (shape, mean, stddev), dtype, seed, name)


def random_uniform(  # noqa: PLR0917  # as in TensorFlow 1
    shape: Sequence[int],
    minval: float = 0.0,
    maxval: float = 1.0,
    dtype: Any = None,
    seed: Any = None,
    name: str | None = None,
) -> Tensor:
    """Makes a tensor of uniform random numbers, drawn at every run.

    Example:
        >>> from trainstep import graph
        >>> value = graph.Session().run(graph.random_uniform([3], 2.0, 4.0))
        >>> bool((value >= 2).all() and (value < 4).all())
        True
    """
    return _random_tensor(keras.random.uniform, (shape, minval, maxval), dtype, seed, name)
