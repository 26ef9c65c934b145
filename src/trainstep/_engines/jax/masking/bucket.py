"""The two sizes of an axis: the padded size of the arrays, and the true size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.export import is_symbolic_dim

from trainstep._engines.contract import Refused

Tensor = Any
Dim = Any  # an int, or an expression of symbols
Shape = Sequence[Dim]


def is_dynamic(dim: Dim) -> bool:
    """Whether a dimension depends on a dynamic size."""
    return bool(is_symbolic_dim(dim))


def dynamic_axes(shape: Shape) -> list[int]:
    """Returns the axes of dynamic size."""
    return [axis for axis, dim in enumerate(shape) if is_dynamic(dim)]


def value_of(dim: Dim, sizes: Mapping[str, Any]) -> Any:
    """Returns the value of a dimension for given values of the symbols."""
    return dim._evaluate(sizes) if is_dynamic(dim) else dim


_MOST = 1 << 23  # combinations of sizes to evaluate


class Bucket:
    """The sizes of one evaluation, by the names of the symbols."""

    def __init__(self, padded: Mapping[str, int], true: Mapping[str, Tensor]) -> None:
        self._padded, self._true = padded, true
        self._known: dict[str, int] = {}

    def padded(self, dim: Dim) -> int:
        """Returns the padded size.

        Raises:
            Refused: If it is larger for smaller sizes (`16 - n`, `n % 4`): the true part would not
                fit.
        """
        if not is_dynamic(dim):
            return int(dim)
        text = str(dim)
        if text not in self._known:
            self._known[text] = size = int(value_of(dim, self._padded))
            if self._largest(dim) > size:
                raise Refused(f"a size of {text} does not grow with the dynamic sizes")
        return self._known[text]

    def _largest(self, dim: Dim) -> int:
        """Returns the largest value of a dimension for any sizes up to the bucket's."""
        names = sorted(dim._get_vars())
        counts = [self._padded[name] for name in names]
        if math.prod(counts) > _MOST:
            raise Refused(f"a size of {dim} depends on too many dynamic sizes")
        grid = np.indices(counts).reshape(len(counts), -1) + 1
        values = dim._evaluate(dict(zip(names, grid, strict=True)))
        return int(np.max(values))

    def at(self, amount: Dim) -> int:
        """Returns an amount of padding, which may be negative, for the bucket's sizes."""
        return int(value_of(amount, self._padded))

    def shape(self, shape: Shape) -> tuple[int, ...]:
        """Returns the padded shape."""
        return tuple(map(self.padded, shape))

    def true(self, dim: Dim) -> Tensor:
        """Returns the true size; a tensor if it is dynamic."""
        return jnp.asarray(value_of(dim, self._true), jnp.int32) if is_dynamic(dim) else dim

    def valid(self, shape: Shape, axes: Iterable[int]) -> Tensor:
        """Returns a mask of the true positions along some axes, of a shape that broadcasts."""
        mask: Tensor = True
        for axis in axes:
            ones = [1] * len(shape)
            ones[axis] = size = self.padded(shape[axis])
            positions = lax.broadcasted_iota(jnp.int32, tuple(ones), axis)
            mask = mask & (positions < self.true(shape[axis])) if size else mask
        return mask

    def filled(self, x: Tensor, shape: Shape, axes: Iterable[int], value: Any) -> Tensor:
        """Returns an array with `value` in the padding along these axes."""
        axes = [axis for axis in axes if is_dynamic(shape[axis])]
        if not axes:
            return x
        return jnp.where(self.valid(shape, axes), x, jnp.asarray(value, x.dtype))
