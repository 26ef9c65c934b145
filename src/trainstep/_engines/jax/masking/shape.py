"""Rules for operations that move positions: reshapes, slices, pads, concatenation."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from trainstep._engines.jax.masking.bucket import Shape, Tensor, is_dynamic
from trainstep._engines.jax.masking.evaluate import Equation, rule


@rule("dim_as_value")
def _size(e: Equation) -> Tensor:
    return jnp.asarray(e.bucket.true(e.params["dim"]), e.dtypes[0])


@rule("broadcast_in_dim")
def _broadcast(e: Equation) -> Tensor:
    shape = e.bucket.shape(e.results[0])
    return lax.broadcast_in_dim(e.operands[0], shape, e.params["broadcast_dimensions"])


@rule("squeeze")
def _squeeze(e: Equation) -> Tensor:
    return lax.squeeze(e.operands[0], e.params["dimensions"])


@rule("iota")
def _iota(e: Equation) -> Tensor:
    shape = e.bucket.shape(e.results[0])
    return lax.broadcasted_iota(e.params["dtype"], shape, e.params["dimension"])


@rule("rev")
def _reverse(e: Equation) -> Tensor:
    x = lax.rev(e.operands[0], e.params["dimensions"])
    for axis in e.params["dimensions"]:
        dim = e.shapes[0][axis]
        if is_dynamic(dim):  # the true part is at the end now; roll it to the front
            x = jnp.roll(x, e.bucket.true(dim) - x.shape[axis], axis)
    return x


@rule("reshape")
def _reshape(e: Equation) -> Tensor:
    (x,), (source,), (target,) = e.operands, e.shapes, e.results
    order = e.params.get("dimensions")
    if order is not None:
        x, source = lax.transpose(x, order), [source[axis] for axis in order]
    if _keeps_order(source, target):
        return lax.reshape(x, e.bucket.shape(target))
    return _regrouped(e, x, source, target)


def _keeps_order(source: Shape, target: Shape) -> bool:
    """Whether the true part stays in front when the padded array is reshaped.

    It does if, after the leading axes that both shapes share, only the outermost is dynamic.
    """
    before = [d for d in source if is_dynamic(d) or d != 1]
    after = [d for d in target if is_dynamic(d) or d != 1]
    while before and after and _same(before[0], after[0]):
        before, after = before[1:], after[1:]
    return not any(map(is_dynamic, (*before[1:], *after[1:])))


def _same(a: Any, b: Any) -> bool:
    return is_dynamic(a) == is_dynamic(b) and bool(a == b)


def _regrouped(e: Equation, x: Tensor, source: Shape, target: Shape) -> Tensor:
    """Gathers row by row: row i of the true target is row i of the true source."""
    inner = 0
    while inner < min(len(source), len(target)) and _same(source[~inner], target[~inner]):
        inner += 1
    outer, wanted = source[: len(source) - inner], target[: len(target) - inner]
    tail = e.bucket.shape(source[len(source) - inner :])
    sizes, new = e.bucket.shape(outer), e.bucket.shape(wanted)
    row, stride = jnp.zeros(new, jnp.int32), 1
    for axis in reversed(range(len(new))):  # the index of each row in the true target
        row = row + lax.broadcasted_iota(jnp.int32, new, axis) * stride
        stride = stride * e.bucket.true(wanted[axis])
    place, step = jnp.zeros(new, jnp.int32), 1
    for axis in reversed(range(len(sizes))):  # and its position in the padded source
        size = jnp.maximum(e.bucket.true(outer[axis]), 1)
        place = place + jnp.clip(row % size, 0, sizes[axis] - 1) * step
        row, step = row // size, step * sizes[axis]
    rows = lax.reshape(x, (math.prod(sizes), *tail))
    return jnp.take(rows, place.reshape(-1), axis=0, mode="clip").reshape(*new, *tail)


@rule("slice")
def _slice(e: Equation) -> Tensor:
    x = e.operands[0]
    starts, limits = e.params["start_indices"], e.params["limit_indices"]
    strides = e.params["strides"] or (1,) * len(starts)
    for axis, (start, limit, stride) in enumerate(zip(starts, limits, strides, strict=True)):
        if not is_dynamic(start):
            x = lax.slice_in_dim(x, start, e.bucket.padded(limit), stride, axis)
        elif stride != 1:
            raise e.refuse("by strides from a dynamic start has no rule")
        else:
            places = e.bucket.true(start) + jnp.arange(e.bucket.padded(limit - start))
            x = jnp.take(x, places, axis=axis, mode="clip")
    return x


@rule("concatenate")
def _join(e: Equation) -> Tensor:
    axis = e.params["dimension"]
    if not any(is_dynamic(shape[axis]) for shape in e.shapes[:-1]):
        return lax.concatenate(e.operands, axis)
    # Each piece starts where the true part of the previous one ends, and overwrites its padding.
    joined = lax.concatenate(e.operands, axis)
    start = e.bucket.true(e.shapes[0][axis])
    for piece, shape in zip(e.operands[1:], e.shapes[1:], strict=True):
        joined = lax.dynamic_update_slice_in_dim(joined, piece, start, axis)
        start = start + e.bucket.true(shape[axis])
    return lax.slice_in_dim(joined, 0, e.bucket.padded(e.results[0][axis]), axis=axis)


@rule("pad")
def _pad(e: Equation) -> Tensor:
    x, value = e.operands
    config = e.params["padding_config"]
    if any(is_dynamic(between) for *_, between in config):
        raise e.refuse("between positions by a dynamic amount has no rule")
    # Dynamic padding at the front is added at the end, and rolled to the front.
    padded = [
        (0, e.bucket.at(low) + e.bucket.at(high), between)
        if is_dynamic(low)
        else (low, e.bucket.at(high), between)
        for low, high, between in config
    ]
    x = lax.pad(x, value, padded)
    for axis, (low, _, between) in enumerate(config):
        dim, start = e.shapes[0][axis], e.bucket.true(low)
        if is_dynamic(dim) or is_dynamic(low):  # this padding begins at the true end
            size = e.bucket.true(dim)
            end = start + size + jnp.maximum(size - 1, 0) * between
            x = jnp.roll(x, start, axis) if is_dynamic(low) else x
            places = lax.broadcasted_iota(jnp.int32, x.shape, axis)
            x = jnp.where((places >= start) & (places < end), x, value)
    return x


@rule("split")
def _split(e: Equation) -> Any:
    axis, sizes = e.params["axis"], e.params["sizes"]
    if not is_dynamic(e.shapes[0][axis]):
        return e.bind(*e.operands)
    pieces, start = [], 0
    for size in sizes:  # each starts where the true part of the previous one ends
        places = start + jnp.arange(e.bucket.padded(size))
        pieces.append(jnp.take(e.operands[0], places, axis=axis, mode="clip"))
        start = start + e.bucket.true(size)
    return pieces


@rule("unstack")
def _unstack(e: Equation) -> Any:
    if is_dynamic(e.shapes[0][e.params["axis"]]):
        raise e.refuse("along an axis of dynamic size has no rule")
    return e.bind(*e.operands)


@rule("stack")
def _stack(e: Equation) -> Any:
    return e.bind(*e.operands)


@rule("tile")
def _tile(e: Equation) -> Tensor:
    counts, shape = e.params["reps"], e.shapes[0]
    for count, dim in zip(counts, shape, strict=True):
        if is_dynamic(dim) and not _same(count, 1):
            raise e.refuse("of an axis of dynamic size has no rule")
        if is_dynamic(count) and not _same(dim, 1):
            raise e.refuse("by a dynamic number has no rule")
    return jnp.tile(e.operands[0], tuple(map(e.bucket.padded, counts)))
