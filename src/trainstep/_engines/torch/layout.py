"""PyTorch: splits a batch over processes, one device each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trainstep._common.errors import StrategyError, variables_are_whole
from trainstep._engines.contract import (
    Axes,
    Executable,
    Sizes,
    Tensor,
    Traced,
    Variable,
    nothing_assumed,
)
from trainstep._engines.shared.row_cuts import batch_of, with_own_rows
from trainstep._engines.torch.collectives import gather
from trainstep._engines.torch.partition.partition import Rows, partitioned
from trainstep._engines.torch.partition.shapes import dynamic_sizes, fixed_sizes
from trainstep._engines.torch.processes import all_gather, broadcast
from trainstep._engines.torch.state import as_tensor, set_grad_enabled, value_of, write_back


def layout(kind: str, devices: Sequence[Any] | None) -> Layout | None:
    """Returns the layout over all processes; None if there is one process."""
    if kind == "sharded":
        raise variables_are_whole("torch")
    if devices is not None and len(devices) > 1:
        raise StrategyError(
            "on torch, a process has one device.\n"
            "  expected: one device, and one process per device\n"
            f"  got:      {len(devices)} devices\n"
            "  to fix:   start as many processes (torchrun), and call `trainstep.initialize()`"
        )
    return Layout() if dist.is_initialized() else None


class Layout:
    """Splits batches along their first axis, a part per process; replicates variables."""

    def __init__(self) -> None:
        self.parts = self.processes = dist.get_world_size()
        self._index = dist.get_rank()

    def rows(self, count: int) -> Rows:
        """Returns the rows of this process."""
        index, parts = self._index, self.parts
        return Rows(count, count * index // parts, count * (index + 1) // parts)

    def part(
        self,
        module: Any,
        reads: list[Variable],
        writes: list[Variable],
        tensors: list[Tensor],
        *,
        axes: Axes | None = None,
        violated_assumption: Callable[[Sizes], str] = nothing_assumed,
    ) -> Executable:
        """Returns an executable for this process's part of a step.

        Args:
            module: The record.
            reads: The variables that are its first inputs.
            writes: The variables whose new values are its first outputs.
            tensors: The arguments that it was recorded with.
            axes: Their dynamic sizes.
            violated_assumption: Returns the assumption that given sizes violate, see `Traced`.
        """
        self._agree_on({id(v): v for v in (*reads, *writes)}.values())
        batch, count, name = batch_of(tensors, axes)
        state = [v._value.detach() for v in reads]
        if axes is None:
            drawn = torch.get_rng_state()
            shapes = fixed_sizes(module, [*(x.clone() for x in state), *tensors], count)
            torch.set_rng_state(drawn)
        else:
            shapes = dynamic_sizes(
                module,
                state,
                tensors,
                axes=axes,
                rows=name or count,
                violated_assumption=violated_assumption,
            )
        rows = self.rows(count) if name is None else None
        call = partitioned(module, shapes, [False] * len(reads) + batch, rows).forward
        outputs = slice(len(writes), None)

        def run(leaves: Sequence[Any]) -> Sequence[Tensor]:
            own = rows or self._rows_of(leaves, batch)
            arrays = [
                as_tensor(x[own.start : own.stop] if is_batch else x)
                for x, is_batch in zip(leaves, batch, strict=True)
            ]
            given = () if rows else own
            enabled = torch.is_grad_enabled()
            try:
                set_grad_enabled(False)
                results = call(*given, *map(value_of, reads), *arrays)
                write_back(writes, results)
            finally:
                set_grad_enabled(enabled)
            return results[outputs]  # type: ignore[no-any-return]

        return run

    def in_all(self, traced: Traced, tensors: list[Tensor], axes: Axes | None = None) -> Traced:
        """Wraps a step that could not be recorded: every process computes the whole batch."""
        self._agree_on({id(v): v for v in (*traced.reads, *traced.writes)}.values())
        batch, _, _ = batch_of(tensors, axes)

        def build(compiler: str, bucket: Sizes | None = None) -> Executable:
            run = traced.build(compiler)

            def gathered(leaves: Sequence[Any]) -> Sequence[Tensor]:
                rows = self._rows_of(leaves, batch)
                arrays = [
                    gather(as_tensor(x[rows.start : rows.stop]), 0, rows.start, rows.total)
                    if is_batch
                    else x
                    for x, is_batch in zip(leaves, batch, strict=True)
                ]
                return run(arrays)

            return gathered

        return replace(traced, build=build)

    def _rows_of(self, leaves: Sequence[Any], batch: Sequence[bool]) -> Rows:
        """Returns this process's rows of a call."""
        found = (x.shape[0] for x, is_batch in zip(leaves, batch, strict=True) if is_batch)
        return self.rows(next(found, 0))

    @staticmethod
    def _agree_on(variables: Any) -> None:
        """Gives variables the values of the first process, when they are first used."""
        new = [v for v in variables if not getattr(v, "_trainstep_agreed", False)]
        values = broadcast([_bytes_of(v._value) for v in new])
        for variable, value in zip(new, values, strict=True):
            own = variable._value
            own.data = torch.from_numpy(value).view(own.dtype).reshape(own.shape).clone()
            variable._trainstep_agreed = True

    def assembled(
        self, shape: tuple[int, ...], axis: int, read: Callable[[tuple[slice, ...]], Any]
    ) -> Any:
        """Returns an array of a batch with only the rows of this process read; others are zero."""
        rows = self.rows(shape[axis])
        return with_own_rows(shape, axis, rows.start, rows.stop, read)

    def joined(self, leaves: Sequence[Any] | None, last: Sequence[Any] | None) -> list[Any] | None:
        """Joins the rows of all processes into one batch; returns None if no process has any."""
        found = [each for each in all_gather(leaves) if each is not None]
        if not found:
            return None
        return [np.concatenate(parts) for parts in zip(*found, strict=True)]

    @staticmethod
    def agree(arrays: Sequence[Any]) -> list[Any]:
        """Returns the arrays of the first process, in every process."""
        return list(broadcast(list(arrays)))


def _bytes_of(tensor: Tensor) -> Any:
    """Returns the elements of a tensor as bytes: NumPy does not have all dtypes of torch."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
