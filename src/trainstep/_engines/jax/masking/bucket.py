"""The two sizes of an axis: what the arrays have, and what counts."""

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


def varies(dim: Dim) -> bool:
    """Whether a dimension depends on a size that varies."""
    return bool(is_symbolic_dim(dim))


def varying(shape: Shape) -> list[int]:
    """The axes whose size varies."""
    return [axis for axis, dim in enumerate(shape) if varies(dim)]


def value_of(dim: Dim, sizes: Mapping[str, Any]) -> Any:
    """A dimension, given the symbols' values."""
    return dim._evaluate(sizes) if varies(dim) else dim


_MOST = 1 << 23  # combinations of sizes that are tried


class Bucket:
    """The sizes of one evaluation, by the names of the symbols."""

    def __init__(self, padded: Mapping[str, int], true: Mapping[str, Tensor]) -> None:
        self._padded, self._true = padded, true
        self._known: dict[str, int] = {}

    def padded(self, dim: Dim) -> int:
        """The size that arrays have.

        Raises:
            Refused: If it is larger for smaller sizes (`16 - n`, `n % 4`): what counts would not
                fit.
        """
        if not varies(dim):
            return int(dim)
        text = str(dim)
        if text not in self._known:
            self._known[text] = size = int(value_of(dim, self._padded))
            if self._largest(dim) > size:
                raise Refused(f"a size of {text}, which does not grow with the sizes that vary,")
        return self._known[text]

    def _largest(self, dim: Dim) -> int:
        """The largest value of a dimension for any sizes up to the bucket's."""
        names = sorted(dim._get_vars())
        counts = [self._padded[name] for name in names]
        if math.prod(counts) > _MOST:
            raise Refused(f"a size of {dim}, of too many sizes that vary,")
        grid = np.indices(counts).reshape(len(counts), -1) + 1
        values = dim._evaluate(dict(zip(names, grid, strict=True)))
        return int(np.max(values))

    def at(self, amount: Dim) -> int:
        """An amount of padding, which is no size of an array, as it is in the bucket."""
        return int(value_of(amount, self._padded))

    def shape(self, shape: Shape) -> tuple[int, ...]:
        """The shape that arrays have."""
        return tuple(map(self.padded, shape))

    def true(self, dim: Dim) -> Tensor:
        """The size that counts; a tensor if it varies."""
        return jnp.asarray(value_of(dim, self._true), jnp.int32) if varies(dim) else dim

    def valid(self, shape: Shape, axes: Iterable[int]) -> Tensor:
        """A mask of the positions that count along some axes, of a shape that broadcasts."""
        mask: Tensor = True
        for axis in axes:
            ones = [1] * len(shape)
            ones[axis] = size = self.padded(shape[axis])
            positions = lax.broadcasted_iota(jnp.int32, tuple(ones), axis)
            mask = mask & (positions < self.true(shape[axis])) if size else mask
        return mask

    def filled(self, x: Tensor, shape: Shape, axes: Iterable[int], value: Any) -> Tensor:
        """An array with `value` wherever a position does not count along one of the axes."""
        axes = [axis for axis in axes if varies(shape[axis])]
        if not axes:
            return x
        return jnp.where(self.valid(shape, axes), x, jnp.asarray(value, x.dtype))
