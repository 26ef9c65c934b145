"""Rules for reading and writing at places that are known when the program runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode

from trainstep._engines.jax.masking.bucket import Dim, Tensor, varies, varying
from trainstep._engines.jax.masking.evaluate import Equation, Rule, rule
from trainstep._engines.jax.masking.reduce import Neutral, highest, lowest, one, zero

# Places of the padding are in no order, and some may come twice.
_UNORDERED = {"indices_are_sorted": False, "unique_indices": False}


def _wide(places: Tensor) -> Tensor:
    """Places of a type whose largest number is no place."""
    places = jnp.asarray(places)
    return places.astype(jnp.int32) if places.dtype.itemsize < 4 else places


def _nowhere(places: Tensor) -> Tensor:
    """A place that no array has."""
    return jnp.asarray(jnp.iinfo(places.dtype).max, places.dtype)


def _bounded(places: Tensor, column: int, last: Tensor, *, dropped: bool) -> Tensor:
    """Places with those past the true end dropped or moved, so that none is in the padding."""
    these = places[..., column]
    if dropped:
        these = jnp.where(these > last, _nowhere(places), these)
    else:
        these = jnp.clip(these, 0, last)
    return places.at[..., column].set(these.astype(places.dtype))


def _roomy(e: Equation, operand: Tensor, sizes: Mapping[int, Dim]) -> Tensor:
    """An operand with room behind axes of which slices of varying sizes are taken.

    A slice that ends before the true end may start too late for its padded size.
    """
    if not any(map(varies, sizes.values())):
        return operand
    room = [(0, 0, 0)] * operand.ndim
    for axis, size in sizes.items():
        if varies(size):
            room[axis] = (0, e.bucket.padded(size), 0)
    return lax.pad(operand, jnp.zeros((), operand.dtype), room)


@rule("gather")
def _gather(e: Equation) -> Tensor:
    operand, places = e.operands[0], _wide(e.operands[1])
    numbers, sizes, mode = (e.params[k] for k in ("dimension_numbers", "slice_sizes", "mode"))
    taken = {axis: sizes[axis] for axis in numbers.start_index_map}
    for axis, size in enumerate(sizes):
        if axis not in taken and varies(size) and varies(e.shapes[0][axis] - size):
            raise e.refuse("of slices of another size that varies has no rule")
    for column, axis in enumerate(numbers.start_index_map):
        dim = e.shapes[0][axis]
        if varies(dim):
            last = e.bucket.true(dim) - e.bucket.true(sizes[axis])
            dropped = mode == GatherScatterMode.FILL_OR_DROP
            places = _bounded(places, column, last, dropped=dropped)
    changed = _UNORDERED if varying(e.shapes[1]) else {}
    operand = _roomy(e, operand, taken)
    return e.bind(operand, places, slice_sizes=e.bucket.shape(sizes), **changed)


def _scatter(neutral: Neutral | None) -> Rule:
    """Neutral updates beyond the true end; without a neutral value, places that are dropped."""

    def scatter(e: Equation) -> Tensor:
        operand, places, updates = e.operands[0], _wide(e.operands[1]), e.operands[2]
        numbers, mode = e.params["dimension_numbers"], e.params["mode"]
        windows = set(numbers.update_window_dims)
        rows = [axis for axis in varying(e.shapes[2]) if axis not in windows]
        partial = _partial_windows(e, numbers)
        if neutral is not None:
            updates = e.filled(2, [*rows, *partial], neutral(updates.dtype))
        elif partial or (rows and mode != GatherScatterMode.FILL_OR_DROP):
            raise e.refuse("into a part of an axis whose size varies has no rule")
        elif rows:
            axes = varying(e.shapes[1])
            places = e.bucket.filled(places, e.shapes[1], axes, _nowhere(places))
        windows_of = _windows(e, numbers)
        for column, axis in enumerate(numbers.scatter_dims_to_operand_dims):
            dim = e.shapes[0][axis]
            if varies(dim):
                last = e.bucket.true(dim) - e.bucket.true(windows_of.get(axis, 1))
                # A place that was promised to be in bounds and is not is dropped here, too.
                dropped = mode != GatherScatterMode.CLIP
                places = _bounded(places, column, last, dropped=dropped)
        changed = _UNORDERED if rows else {}
        moved = {a: windows_of.get(a, 1) for a in numbers.scatter_dims_to_operand_dims}
        result = e.bind(_roomy(e, operand, moved), places, updates, **changed)
        return lax.slice(result, (0,) * operand.ndim, operand.shape)

    return scatter


def _windows(e: Equation, numbers: Any) -> dict[int, Dim]:
    """By axis of the operand, the size of the window that an update covers."""
    outside = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    covered = [axis for axis in range(len(e.shapes[0])) if axis not in outside]
    sizes = [e.shapes[2][axis] for axis in sorted(numbers.update_window_dims)]
    return dict(zip(covered, sizes, strict=True))


def _partial_windows(e: Equation, numbers: Any) -> list[int]:
    """The axes of the updates that vary and cover another size of the operand."""
    pairs = zip(sorted(numbers.update_window_dims), _windows(e, numbers).items(), strict=True)
    return [
        axis
        for axis, (covered, size) in pairs
        if varies(size) and not bool(size == e.shapes[0][covered])
    ]


for _kind, _neutral in (
    ("add", zero),
    ("sub", zero),
    ("mul", one),
    ("max", lowest),
    ("min", highest),
):
    rule(f"scatter_{_kind}", f"scatter-{_kind}")(_scatter(_neutral))
rule("scatter")(_scatter(None))


@rule("dynamic_slice")
def _dynamic_slice(e: Equation) -> Tensor:
    x, *starts = e.operands
    sizes = e.params["slice_sizes"]
    starts = [_start(e, s, d, z) for s, d, z in zip(starts, e.shapes[0], sizes, strict=True)]
    return e.bind(x, *starts, slice_sizes=e.bucket.shape(sizes))


@rule("dynamic_update_slice")
def _dynamic_update_slice(e: Equation) -> Tensor:
    x, update, *starts = e.operands
    sizes = e.shapes[1]
    starts = [_start(e, s, d, z) for s, d, z in zip(starts, e.shapes[0], sizes, strict=True)]
    return e.bind(x, update, *starts)


def _start(e: Equation, start: Tensor, dim: Dim, size: Dim) -> Tensor:
    """Where a slice of `size` begins on an axis of size `dim`: it must end before the true end."""
    start = jnp.asarray(start)
    if not varies(dim):
        if varies(size):
            raise e.refuse("of a size that varies has no rule")
        return start
    if not varies(size):
        return jnp.clip(start, 0, e.bucket.true(dim) - size).astype(start.dtype)
    if dim == size:
        return jnp.zeros_like(start)
    raise e.refuse("of another size that varies has no rule")
