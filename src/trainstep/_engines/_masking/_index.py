"""Rules for reading and writing at places that are known when the program runs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode

from trainstep._engines._masking._bucket import Dim, Tensor, varies, varying
from trainstep._engines._masking._evaluate import Equation, Rule, rule
from trainstep._engines._masking._reduce import Neutral, highest, lowest, one, zero

# Places of the padding are in no order, and some may come twice.
_UNORDERED = {"indices_are_sorted": False, "unique_indices": False}


def _bounded(places: Tensor, column: int, last: Tensor, mode: Any) -> Tensor:
    """Places with those past the true end where the mode wants them, not in the padding."""
    these = places[..., column]
    if mode == GatherScatterMode.FILL_OR_DROP:
        these = jnp.where(these > last, jnp.iinfo(places.dtype).max, these)
    else:
        these = jnp.clip(these, 0, last)
    return places.at[..., column].set(these.astype(places.dtype))


@rule("gather")
def _gather(e: Equation) -> Tensor:
    operand, places = e.operands
    numbers, sizes, mode = (e.params[k] for k in ("dimension_numbers", "slice_sizes", "mode"))
    for axis, size in enumerate(sizes):
        dim = e.shapes[0][axis]
        if varies(size) and varies(dim - size):
            raise e.refuse("of slices of another size that varies has no rule")
    for column, axis in enumerate(numbers.start_index_map):
        dim = e.shapes[0][axis]
        if varies(dim):
            last = e.bucket.true(dim - sizes[axis])
            places = _bounded(places, column, last, mode)
    changed = _UNORDERED if varying(e.shapes[1]) else {}
    return e.bind(operand, places, slice_sizes=e.bucket.shape(sizes), **changed)


def _scatter(neutral: Neutral | None) -> Rule:
    """Neutral updates beyond the true end; without a neutral value, places that are dropped."""

    def scatter(e: Equation) -> Tensor:
        operand, places, updates = e.operands
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
            places = e.filled(1, axes, jnp.iinfo(places.dtype).max)
        for column, axis in enumerate(numbers.scatter_dims_to_operand_dims):
            dim = e.shapes[0][axis]
            if varies(dim):
                if axis not in numbers.inserted_window_dims:
                    raise e.refuse("of slices of an axis whose size varies has no rule")
                places = _bounded(places, column, e.bucket.true(dim) - 1, mode)
        changed = _UNORDERED if rows else {}
        return e.bind(operand, places, updates, **changed)

    return scatter


def _partial_windows(e: Equation, numbers: Any) -> list[int]:
    """The axes of the updates that vary and cover another size of the operand."""
    outside = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    covered = [axis for axis in range(len(e.shapes[0])) if axis not in outside]
    pairs = zip(sorted(numbers.update_window_dims), covered, strict=True)
    return [u for u, o in pairs if varies(e.shapes[2][u]) and not _same(e, u, o)]


def _same(e: Equation, update_axis: int, operand_axis: int) -> bool:
    return bool(e.shapes[2][update_axis] == e.shapes[0][operand_axis])


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
    return lax.dynamic_slice(x, starts, e.bucket.shape(sizes))


@rule("dynamic_update_slice")
def _dynamic_update_slice(e: Equation) -> Tensor:
    x, update, *starts = e.operands
    sizes = e.shapes[1]
    starts = [_start(e, s, d, z) for s, d, z in zip(starts, e.shapes[0], sizes, strict=True)]
    return lax.dynamic_update_slice(x, update, starts)


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
