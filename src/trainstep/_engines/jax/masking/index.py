"""Rules for reading and writing at positions that are known at run time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode

from trainstep._engines.jax.masking.bucket import Dim, Tensor, dynamic_axes, is_dynamic
from trainstep._engines.jax.masking.evaluate import Equation, Rule, rule
from trainstep._engines.jax.masking.reduce import Neutral, highest, lowest, one, zero

# Positions in the padding are unordered, and may be duplicates.
_UNORDERED = {"indices_are_sorted": False, "unique_indices": False}


def _wide(places: Tensor) -> Tensor:
    """Returns positions of a dtype whose maximum is never a valid position."""
    places = jnp.asarray(places)
    return places.astype(jnp.int32) if places.dtype.itemsize < 4 else places


def _out_of_bounds(places: Tensor) -> Tensor:
    """Returns a position that is out of bounds for any array."""
    return jnp.asarray(jnp.iinfo(places.dtype).max, places.dtype)


def _bounded(places: Tensor, column: int, last: Tensor, *, dropped: bool) -> Tensor:
    """Drops or clips positions past the true end, so that none is in the padding."""
    these = places[..., column]
    if dropped:
        these = jnp.where(these > last, _out_of_bounds(places), these)
    else:
        these = jnp.clip(these, 0, last)
    return places.at[..., column].set(these.astype(places.dtype))


def _with_room(e: Equation, operand: Tensor, sizes: Mapping[int, Dim]) -> Tensor:
    """Pads an operand behind axes from which slices of dynamic size are read.

    A slice that ends before the true end may start too late for its padded size to fit.
    """
    if not any(map(is_dynamic, sizes.values())):
        return operand
    room = [(0, 0, 0)] * operand.ndim
    for axis, size in sizes.items():
        if is_dynamic(size):
            room[axis] = (0, e.bucket.padded(size), 0)
    return lax.pad(operand, jnp.zeros((), operand.dtype), room)


@rule("gather")
def _gather(e: Equation) -> Tensor:
    operand, places = e.operands[0], _wide(e.operands[1])
    numbers, sizes, mode = (e.params[k] for k in ("dimension_numbers", "slice_sizes", "mode"))
    taken = {axis: sizes[axis] for axis in numbers.start_index_map}
    for axis, size in enumerate(sizes):
        if axis not in taken and is_dynamic(size) and is_dynamic(e.shapes[0][axis] - size):
            raise e.refuse("of slices of another dynamic size has no rule")
    for column, axis in enumerate(numbers.start_index_map):
        dim = e.shapes[0][axis]
        if is_dynamic(dim):
            last = e.bucket.true(dim) - e.bucket.true(sizes[axis])
            dropped = mode == GatherScatterMode.FILL_OR_DROP
            places = _bounded(places, column, last, dropped=dropped)
    changed = _UNORDERED if dynamic_axes(e.shapes[1]) else {}
    operand = _with_room(e, operand, taken)
    return e.bind(operand, places, slice_sizes=e.bucket.shape(sizes), **changed)


def _scatter(neutral: Neutral | None) -> Rule:
    """Makes updates in the padding neutral; without a neutral value, drops them."""

    def scatter(e: Equation) -> Tensor:
        operand, places, updates = e.operands[0], _wide(e.operands[1]), e.operands[2]
        numbers, mode = e.params["dimension_numbers"], e.params["mode"]
        windows = set(numbers.update_window_dims)
        rows = [axis for axis in dynamic_axes(e.shapes[2]) if axis not in windows]
        partial = _partial_windows(e, numbers)
        if neutral is not None:
            updates = e.filled(2, [*rows, *partial], neutral(updates.dtype))
        elif partial or (rows and mode != GatherScatterMode.FILL_OR_DROP):
            raise e.refuse("into a part of an axis of dynamic size has no rule")
        elif rows:
            axes = dynamic_axes(e.shapes[1])
            places = e.bucket.filled(places, e.shapes[1], axes, _out_of_bounds(places))
        windows_of = _windows(e, numbers)
        for column, axis in enumerate(numbers.scatter_dims_to_operand_dims):
            dim = e.shapes[0][axis]
            if is_dynamic(dim):
                last = e.bucket.true(dim) - e.bucket.true(windows_of.get(axis, 1))
                # PROMISE_IN_BOUNDS: a position that is out of bounds after all is dropped.
                dropped = mode != GatherScatterMode.CLIP
                places = _bounded(places, column, last, dropped=dropped)
        changed = _UNORDERED if rows else {}
        moved = {a: windows_of.get(a, 1) for a in numbers.scatter_dims_to_operand_dims}
        result = e.bind(_with_room(e, operand, moved), places, updates, **changed)
        return lax.slice(result, (0,) * operand.ndim, operand.shape)

    return scatter


def _windows(e: Equation, numbers: Any) -> dict[int, Dim]:
    """Returns, by axis of the operand, the size of the window that an update covers."""
    outside = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    covered = [axis for axis in range(len(e.shapes[0])) if axis not in outside]
    sizes = [e.shapes[2][axis] for axis in sorted(numbers.update_window_dims)]
    return dict(zip(covered, sizes, strict=True))


def _partial_windows(e: Equation, numbers: Any) -> list[int]:
    """Returns the dynamic axes of the updates that cover a part of the operand's axis."""
    pairs = zip(sorted(numbers.update_window_dims), _windows(e, numbers).items(), strict=True)
    return [
        axis
        for axis, (covered, size) in pairs
        if is_dynamic(size) and not bool(size == e.shapes[0][covered])
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
    """Returns the start of a slice of `size` on an axis of `dim`, so that it ends in bounds."""
    start = jnp.asarray(start)
    if not is_dynamic(dim):
        if is_dynamic(size):
            raise e.refuse("of a dynamic size has no rule")
        return start
    if not is_dynamic(size):
        return jnp.clip(start, 0, e.bucket.true(dim) - size).astype(start.dtype)
    if dim == size:
        return jnp.zeros_like(start)
    raise e.refuse("of another dynamic size has no rule")
