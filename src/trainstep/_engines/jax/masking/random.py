"""Rules for random numbers: true positions get the numbers of the unpadded step.

JAX's default generator computes each number from the key and the flat index of its position. If
only the first axis is padded, flat indices do not change. For other axes, the flat indices of the
true shape are computed here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from trainstep._engines.jax.masking.bucket import Shape, Tensor, dynamic_axes
from trainstep._engines.jax.masking.evaluate import Equation, rule

_NARROW = {8: jnp.uint8, 16: jnp.uint16}


@rule("random_bits")
def _bits(e: Equation) -> Tensor:
    (keys,), shape, width = e.operands, e.params["shape"], e.params["bit_width"]
    _check_generator(e)
    padded = e.bucket.shape(shape)
    if set(dynamic_axes(shape)) <= {0}:
        return e.bind(keys, shape=padded)
    if keys.ndim:
        raise e.refuse("of many keys, along an inner axis of dynamic size, has no rule")
    key = jax.random.key_data(keys)
    places = _places(e, shape, padded)
    high, low = threefry2x32_p.bind(key[0], key[1], jnp.zeros_like(places), places)
    if width == 64:
        return lax.shift_left(high.astype(jnp.uint64), jnp.uint64(32)) | low.astype(jnp.uint64)
    bits = high ^ low
    return bits if width == 32 else bits.astype(_NARROW[width])


@rule("random_split")
def _split(e: Equation) -> Tensor:
    shape = e.params["shape"]
    _check_generator(e)
    if not set(dynamic_axes(shape)) <= {0}:
        raise e.refuse("along an inner axis of dynamic size has no rule")
    return e.bind(*e.operands, shape=e.bucket.shape(shape))


@rule("random_gamma")
def _gamma(e: Equation) -> Tensor:
    # One key is split over all positions, by their flat index.
    if not set(dynamic_axes(e.results[0])) <= {0} or dynamic_axes(e.shapes[0]):
        raise e.refuse("along an inner axis of dynamic size has no rule")
    return e.bind(*e.operands)


def _check_generator(e: Equation) -> None:
    name = str(jax.random.key_impl(e.operands[0]))
    if "fry" not in name or not jax.config.jax_threefry_partitionable:
        raise e.refuse(f"of the generator {name} has no rule")


def _places(e: Equation, shape: Shape, padded: tuple[int, ...]) -> Tensor:
    """Returns the flat index of each position in the true shape."""
    place, stride = jnp.zeros(padded, jnp.uint32), jnp.uint32(1)
    for axis in reversed(range(len(padded))):
        place = place + lax.broadcasted_iota(jnp.uint32, padded, axis) * stride
        stride = stride * jnp.asarray(e.bucket.true(shape[axis]), jnp.uint32)
    return place
