"""PyTorch: a batch over processes, one device each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trainstep._engines._base import Executable, Sizes, Tensor, Traced, Variable
from trainstep._engines._cuts import with_own_rows
from trainstep._engines._torch_collectives import gather
from trainstep._engines._torch_parts import Rows, partitioned
from trainstep._engines._torch_processes import told
from trainstep._engines._torch_state import as_tensor, set_grad_enabled, value_of, write_back
from trainstep._errors import StrategyError, variables_are_whole


def layout(kind: str, devices: Sequence[Any] | None) -> Layout | None:
    """The layout over all processes; None if there is one."""
    if kind == "sharded":
        raise variables_are_whole("torch")
    if devices is not None and len(devices) > 1:
        raise StrategyError(
            "on torch, a process has one device.\n"
            "  expected: one device, and a process for each\n"
            f"  came:     {len(devices)} devices\n"
            "  to fix:   start as many processes (torchrun), and call `trainstep.initialize()`"
        )
    return Layout() if dist.is_initialized() else None


class Layout:
    """Batches cut along their first axis, a part for each process; variables whole in each."""

    shares_sizes = False  # a record is cut for its own sizes

    def __init__(self) -> None:
        self.parts = self.processes = dist.get_world_size()
        self._index = dist.get_rank()

    def rows(self, count: int) -> Rows:
        """The rows of this process."""
        index, parts = self._index, self.parts
        return Rows(count, count * index // parts, count * (index + 1) // parts)

    def part(
        self, module: Any, reads: list[Variable], writes: list[Variable], tensors: list[Tensor]
    ) -> Executable:
        """What runs the part of a step that is this process's."""
        self._agree_on({id(v): v for v in (*reads, *writes)}.values())
        batch, rows = self._batch(tensors)
        inputs = [*(v._value.detach().clone() for v in reads), *tensors]
        drawn = torch.get_rng_state()
        call = partitioned(module, inputs, [False] * len(reads) + batch, rows).forward
        torch.set_rng_state(drawn)
        outputs = slice(len(writes), None)

        def run(leaves: Sequence[Any]) -> Sequence[Tensor]:
            arrays = [
                as_tensor(x[rows.start : rows.stop] if is_batch else x)
                for x, is_batch in zip(leaves, batch, strict=True)
            ]
            enabled = torch.is_grad_enabled()
            try:
                set_grad_enabled(False)
                results = call(*map(value_of, reads), *arrays)
                write_back(writes, results)
            finally:
                set_grad_enabled(enabled)
            return results[outputs]  # type: ignore[no-any-return]

        return run

    def in_all(self, traced: Traced, tensors: list[Tensor]) -> Traced:
        """A step that could not be recorded: every process computes the whole of it."""
        self._agree_on({id(v): v for v in (*traced.reads, *traced.writes)}.values())
        batch, rows = self._batch(tensors)

        def build(compiler: str, bucket: Sizes | None = None) -> Executable:
            run = traced.build(compiler)

            def gathered(leaves: Sequence[Any]) -> Sequence[Tensor]:
                arrays = [
                    gather(as_tensor(x[rows.start : rows.stop]), 0, rows.start, rows.total)
                    if is_batch
                    else x
                    for x, is_batch in zip(leaves, batch, strict=True)
                ]
                return run(arrays)

            return gathered

        return replace(traced, build=build)

    def _batch(self, tensors: list[Tensor]) -> tuple[list[bool], Rows]:
        """Which arrays are rows of the batch, and the rows."""
        count = next((x.shape[0] for x in tensors if x.ndim), 0)
        batch = [bool(x.ndim and count and x.shape[0] == count) for x in tensors]
        return batch, self.rows(count)

    @staticmethod
    def _agree_on(variables: Any) -> None:
        """Gives variables the values of the first process, when they are first used."""
        new = [v for v in variables if not getattr(v, "_trainstep_agreed", False)]
        values = told([v._value.detach() for v in new])
        for variable, value in zip(new, values, strict=True):
            variable._value.data = value
            variable._trainstep_agreed = True

    def assembled(
        self, shape: tuple[int, ...], axis: int, read: Callable[[tuple[slice, ...]], Any]
    ) -> Any:
        """An array of a batch, of which this process reads its own rows; the others are zero."""
        rows = self.rows(shape[axis])
        return with_own_rows(shape, axis, rows.start, rows.stop, read)

    def joined(self, leaves: Sequence[Any] | None, last: Sequence[Any] | None) -> list[Any] | None:
        """The arrays of a batch, of the rows that each process has; None if no process has any."""
        every: list[Any] = [None] * self.processes
        dist.all_gather_object(every, leaves)
        found = [each for each in every if each is not None]
        if not found:
            return None
        return [np.concatenate(parts) for parts in zip(*found, strict=True)]

    @staticmethod
    def agree(arrays: Sequence[Any]) -> list[Any]:
        """The arrays of the first process, in all of them."""
        return list(told(list(arrays)))
