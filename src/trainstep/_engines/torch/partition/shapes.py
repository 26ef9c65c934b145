"""PyTorch: infers the shapes of a recorded step, at its own sizes or at sample sizes.

A record for dynamic sizes runs for several sample sizes, on tensors without values, to distinguish
an axis that grows with the batch from one that has the same length by chance. A shape that differs
between samples is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from trainstep._engines.contract import Axes, Refused, Sizes, Tensor
from trainstep._engines.shared.row_cuts import Cut, reshaped
from trainstep._engines.torch.private import fake_tensors
from trainstep._engines.torch.state import memory

# Sample values of dynamic sizes: primes, so that no product of others is a multiple of one; some of
# them small, and some above most limits that a step may have.
_CHOICES = (
    (251, 241, 239, 233, 229, 227, 223, 211),
    (2, 3, 5, 7, 11, 13, 17, 19),
    (3, 2, 7, 5, 13, 11, 19, 17),
    (61, 67, 71, 73, 79, 83, 89, 97),
    (10007, 10009, 10037, 10039, 10061, 10067, 10069, 10079),
)
_FEWEST_SAMPLES = 2  # the minimum to distinguish dynamic sizes


class Shapes:
    """The shapes and the aliasing of the values of a record.

    Attributes:
        memory: By node, an id of its memory.
        is_dynamic: Whether there are dynamic sizes.
    """

    def __init__(self, samples: Sequence[tuple[ShapeRecorder, int]]) -> None:
        self._samples = [sample.found for sample, _ in samples]
        self._rows = [rows for _, rows in samples]
        self._plain = [sample.plain for sample, _ in samples]
        self.memory = samples[0][0].memory
        self.is_dynamic = len(samples) > 1

    def rank(self, node: Any) -> int | None:
        """Returns the number of axes of a value; None if it is not a tensor."""
        ranks = {None if sample[node] is None else len(sample[node]) for sample in self._samples}
        if len(ranks) > 1:
            raise Refused(f"`{node}` has more axes for some sizes than for others")
        return ranks.pop()

    def size(self, node: Any, axis: int) -> int | None:
        """Returns the size of an axis; None if it is dynamic."""
        sizes = {sample[node][axis] for sample in self._samples}
        return sizes.pop() if len(sizes) == 1 else None

    def is_plain(self, node: Any) -> bool:
        """Whether a value is contiguous, from the start of its memory."""
        return all(node in plain for plain in self._plain)

    def same(self, node: Any, other: Any) -> bool:
        """Whether two values have the same shape in all samples."""
        return all(sample[node] == sample[other] for sample in self._samples)

    def is_cut(self, node: Any, cut: Cut) -> bool:
        """Whether a value has the length of a cut along its axis, in all samples."""
        rank = self.rank(node)
        return (
            rank is not None
            and 0 <= cut.axis < rank
            and all(
                sample[node][cut.axis] == rows * cut.unit
                for sample, rows in zip(self._samples, self._rows, strict=True)
            )
        )

    def reshaped(self, before: Any, cut: Cut, after: Any) -> Cut | None:
        """Returns the cut of a value after a reshape."""
        found = {
            reshaped(sample[before], cut, sample[after], rows)
            for sample, rows in zip(self._samples, self._rows, strict=True)
        }
        return found.pop() if len(found) == 1 else None


class ShapeRecorder(fx.Interpreter):  # type: ignore[misc]
    """Runs a record, and stores the shape of every value."""

    def __init__(self, module: Any, mode: Any = None) -> None:
        super().__init__(module)
        self.found: dict[Any, Any] = {}
        self.memory: dict[Any, int] = {}
        self.plain: set[Any] = set()
        self._mode = mode
        self._kept: list[Any] = []  # keeps memory alive, so that ids are unique

    def run_node(self, n: Any) -> Any:
        result = super().run_node(n)
        is_tensor = isinstance(result, torch.Tensor)
        if is_tensor and n.op == "get_attr" and self._mode is not None:
            result = self._mode.from_tensor(result, static_shapes=True)
        self.found[n] = tuple(result.shape) if is_tensor else None
        if is_tensor:
            self.memory[n] = memory(result)
            self._kept.append(result)
            if result.is_contiguous() and result.storage_offset() == 0:
                self.plain.add(n)
        return result


def fixed_sizes(module: Any, inputs: Sequence[Tensor], rows: int) -> Shapes:
    """Returns the shapes of a record for the sizes of its inputs."""
    sample = ShapeRecorder(module)
    with torch.no_grad():
        sample.run(*inputs)
    return Shapes([(sample, rows)])


def dynamic_sizes(
    module: Any,
    state: Sequence[Tensor],
    tensors: Sequence[Tensor],
    *,
    axes: Axes,
    rows: int | str,
    violated_assumption: Callable[[Sizes], str],
) -> Shapes:
    """Returns the shapes of a record for dynamic sizes.

    Args:
        module: The record.
        state: Its first inputs, of fixed sizes.
        tensors: The arguments.
        axes: The names of their dynamic sizes, see `Engine.trace`.
        rows: The number of rows of the batch, or its name.
        violated_assumption: Returns the assumption that given sizes violate, see `Traced`.
    """
    names = list(dict.fromkeys(name for of in axes for name in of if name))
    samples = []
    for chosen in _CHOICES:
        sizes = dict(zip(names, chosen, strict=False))
        if len(sizes) < len(names) or violated_assumption(sizes):
            continue
        mode = fake_tensors().FakeTensorMode(allow_non_fake_inputs=True)
        sample = ShapeRecorder(module, mode)
        try:
            with mode, torch.no_grad():
                given = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in state]
                for x, of in zip(tensors, axes, strict=True):
                    shape = [sizes[a] if a else n for n, a in zip(x.shape, of, strict=True)]
                    given.append(torch.empty(shape, dtype=x.dtype, device=x.device))
                sample.run(*given)
        except Exception as error:
            raise Refused(f"several processes ({_first_line(error)})") from error
        samples.append((sample, sizes[rows] if isinstance(rows, str) else rows))
    if len(samples) < _FEWEST_SAMPLES:
        raise Refused("several processes: the record holds for too few sizes")
    return Shapes(samples)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
