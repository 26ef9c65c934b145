"""PyTorch: the shapes of a recorded step, at its own sizes or at several others put in.

A record for sizes that vary is looked at for some sizes of each, on tensors without values: so an
axis that grows with the batch is told from one that happens to be as long. What is not the same
for all of them is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from trainstep._engines.contract import Axes, Refused, Sizes, Tensor
from trainstep._engines.shared.row_cuts import Cut, reshaped
from trainstep._engines.torch.state import memory

# Sizes to put in for those that vary. Primes, so that no product of others is one of their
# multiples; some that are few, and some that are more than most limits that a step may have.
_CHOICES = (
    (251, 241, 239, 233, 229, 227, 223, 211),
    (2, 3, 5, 7, 11, 13, 17, 19),
    (3, 2, 7, 5, 13, 11, 19, 17),
    (61, 67, 71, 73, 79, 83, 89, 97),
    (10007, 10009, 10037, 10039, 10061, 10067, 10069, 10079),
)
_LOOKS = 2  # the fewest that tell anything


class Shapes:
    """What is known of the values of a record.

    Attributes:
        memory: By value, what tells whether two are in one memory.
        varies: Whether some sizes do.
    """

    def __init__(self, looks: Sequence[tuple[Look, int]]) -> None:
        self._looks = [look.found for look, _ in looks]
        self._rows = [rows for _, rows in looks]
        self._plain = [look.plain for look, _ in looks]
        self.memory = looks[0][0].memory
        self.varies = len(looks) > 1

    def rank(self, node: Any) -> int | None:
        """How many axes a value has; None if it is no tensor."""
        ranks = {None if look[node] is None else len(look[node]) for look in self._looks}
        if len(ranks) > 1:
            raise Refused(f"`{node}` has more axes for some sizes than for others")
        return ranks.pop()

    def size(self, node: Any, axis: int) -> int | None:
        """How long an axis is; None if that varies."""
        sizes = {look[node][axis] for look in self._looks}
        return sizes.pop() if len(sizes) == 1 else None

    def is_plain(self, node: Any) -> bool:
        """Whether the numbers of a value lie in order from the start of its memory."""
        return all(node in plain for plain in self._plain)

    def same(self, node: Any, other: Any) -> bool:
        """Whether two values have one shape, whatever the sizes."""
        return all(look[node] == look[other] for look in self._looks)

    def is_cut(self, node: Any, cut: Cut) -> bool:
        """Whether a value has so many numbers for each row along an axis, whatever the sizes."""
        rank = self.rank(node)
        return (
            rank is not None
            and 0 <= cut.axis < rank
            and all(
                look[node][cut.axis] == rows * cut.unit
                for look, rows in zip(self._looks, self._rows, strict=True)
            )
        )

    def reshaped(self, before: Any, cut: Cut, after: Any) -> Cut | None:
        """How a value is cut after its axes were split or joined."""
        found = {
            reshaped(look[before], cut, look[after], rows)
            for look, rows in zip(self._looks, self._rows, strict=True)
        }
        return found.pop() if len(found) == 1 else None


class Look(fx.Interpreter):  # type: ignore[misc]
    """Runs a record, and notes the shape of every value."""

    def __init__(self, module: Any, mode: FakeTensorMode | None = None) -> None:
        super().__init__(module)
        self.found: dict[Any, Any] = {}
        self.memory: dict[Any, int] = {}
        self.plain: set[Any] = set()
        self._mode = mode
        self._held: list[Any] = []  # so that no memory is used twice

    def run_node(self, n: Any) -> Any:
        result = super().run_node(n)
        is_tensor = isinstance(result, torch.Tensor)
        if is_tensor and n.op == "get_attr" and self._mode is not None:
            result = self._mode.from_tensor(result, static_shapes=True)
        self.found[n] = tuple(result.shape) if is_tensor else None
        if is_tensor:
            self.memory[n] = memory(result)
            self._held.append(result)
            if result.is_contiguous() and result.storage_offset() == 0:
                self.plain.add(n)
        return result


def own_sizes(module: Any, inputs: Sequence[Tensor], rows: int) -> Shapes:
    """The shapes of a record that was made for the sizes of its inputs."""
    look = Look(module)
    with torch.no_grad():
        look.run(*inputs)
    return Shapes([(look, rows)])


def varying_sizes(
    module: Any,
    state: Sequence[Tensor],
    tensors: Sequence[Tensor],
    *,
    axes: Axes,
    rows: int | str,
    violated_assumption: Callable[[Sizes], str],
) -> Shapes:
    """The shapes of a record that was made for sizes that vary.

    Args:
        module: The record.
        state: Its first inputs, whose sizes do not vary.
        tensors: The arguments.
        axes: The names of their sizes, as of `Engine.trace`.
        rows: How many rows the batch has, or the name of that.
        violated_assumption: As of `Traced`.
    """
    names = list(dict.fromkeys(name for of in axes for name in of if name))
    looks = []
    for chosen in _CHOICES:
        sizes = dict(zip(names, chosen, strict=False))
        if len(sizes) < len(names) or violated_assumption(sizes):
            continue
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        look = Look(module, mode)
        try:
            with mode, torch.no_grad():
                given = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in state]
                for x, of in zip(tensors, axes, strict=True):
                    shape = [sizes[a] if a else n for n, a in zip(x.shape, of, strict=True)]
                    given.append(torch.empty(shape, dtype=x.dtype, device=x.device))
                look.run(*given)
        except Exception as error:
            raise Refused(f"several processes ({_first_line(error)})") from error
        looks.append((look, sizes[rows] if isinstance(rows, str) else rows))
    if len(looks) < _LOOKS:
        raise Refused("several processes: it holds for too few sizes")
    return Shapes(looks)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
