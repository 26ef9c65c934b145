"""The steps of a run in order: operations, and tensors of `control_dependencies` blocks.

A tensor of a block is computed once, after the operations that the block depends on; every other
tensor is computed before all updates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import keras

from trainstep.graph._graph import Block, Graph
from trainstep.graph._operations import Operation
from trainstep.graph._tensors import node_of


class DelayedTensor:
    """A tensor that was built in a block, and is needed outside it."""

    parts: Sequence[Any] = ()

    def __init__(self, tensor: Any, block: Block) -> None:
        self.inputs = [tensor]
        self.block = block
        self.index = block.begin

    def uses(self) -> list[Any]:
        """Empty: a tensor runs no user code of its own."""
        return []


Step = Operation | DelayedTensor


def steps_of(graph: Graph, fetches: Sequence[Any], given: Collection[int]) -> list[Step]:
    """Returns the steps of a run, in the order in which the user built them.

    Args:
        graph: The graph.
        fetches: Tensors and operations.
        given: The ids of fed tensors.
    """
    found: dict[int, Step] = {}
    late: dict[int, DelayedTensor] = {}
    todo = list(fetches)
    while todo:
        each = todo.pop()
        if isinstance(each, keras.KerasTensor):
            wanted, within = [each], None
        elif id(each) in found:
            continue
        else:
            found[id(each)] = each
            wanted, within = each.inputs, each.block
            todo += [*each.parts, *(each.block.after if each.block is not None else ())]
        for tensor, block in _from_blocks(graph, wanted, given, within):
            todo.append(late.setdefault(id(tensor), DelayedTensor(tensor, block)))
    return sorted(found.values(), key=lambda step: step.index)


def _from_blocks(
    graph: Graph, tensors: Sequence[Any], given: Collection[int], within: Block | None
) -> Iterator[tuple[Any, Block]]:
    """Yields the nearest tensors of other blocks that the given tensors depend on."""
    seen: set[int] = set()
    todo = list(tensors)
    while todo:
        tensor = todo.pop()
        node = node_of(tensor)
        if node is None or id(tensor) in given or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        block = graph.block_of.get(node)
        if block is None or block is within:
            todo += node.input_tensors
        else:
            yield tensor, block
