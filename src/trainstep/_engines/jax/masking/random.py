"""Rules for random numbers: the true positions draw what they would draw unpadded.

JAX's default generator makes the number of a position from the key and from the position's place
in the flattened array. With only the first axis padded, places stay as they are. With another one,
the places are those of the true shape.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from trainstep._engines.jax.masking.bucket import Shape, Tensor, varying
from trainstep._engines.jax.masking.evaluate import Equation, rule

_NARROW = {8: jnp.uint8, 16: jnp.uint16}


@rule("random_bits")
def _bits(e: Equation) -> Tensor:
    (keys,), shape, width = e.operands, e.params["shape"], e.params["bit_width"]
    _check_generator(e)
    padded = e.bucket.shape(shape)
    if set(varying(shape)) <= {0}:
        return e.bind(keys, shape=padded)
    if keys.ndim:
        raise e.refuse("of many keys, along an inner axis whose size varies, has no rule")
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
    if not set(varying(shape)) <= {0}:
        raise e.refuse("along an inner axis whose size varies has no rule")
    return e.bind(*e.operands, shape=e.bucket.shape(shape))


@rule("random_gamma")
def _gamma(e: Equation) -> Tensor:
    # One key is split over all positions, by their place in the flattened array.
    if not set(varying(e.results[0])) <= {0} or varying(e.shapes[0]):
        raise e.refuse("along an inner axis whose size varies has no rule")
    return e.bind(*e.operands)


def _check_generator(e: Equation) -> None:
    name = str(jax.random.key_impl(e.operands[0]))
    if "fry" not in name or not jax.config.jax_threefry_partitionable:
        raise e.refuse(f"of the generator {name} has no rule")


def _places(e: Equation, shape: Shape, padded: tuple[int, ...]) -> Tensor:
    """The place of each position in the flattened true array."""
    place, stride = jnp.zeros(padded, jnp.uint32), jnp.uint32(1)
    for axis in reversed(range(len(padded))):
        place = place + lax.broadcasted_iota(jnp.uint32, padded, axis) * stride
        stride = stride * jnp.asarray(e.bucket.true(shape[axis]), jnp.uint32)
    return place
