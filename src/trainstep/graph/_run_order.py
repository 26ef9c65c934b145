"""What a run does, one after the other: operations, and tensors whose moment matters.

What is written inside a `control_dependencies` is computed after the operations that it depends on,
once; everything else is computed before all updates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import keras

from trainstep.graph._graph import Block, Graph
from trainstep.graph._operations import Operation
from trainstep.graph._tensors import node_of


class Late:
    """A tensor that was written in a block, and is wanted outside of it."""

    parts: Sequence[Any] = ()

    def __init__(self, tensor: Any, block: Block) -> None:
        self.inputs = [tensor]
        self.block = block
        self.index = block.begin

    def uses(self) -> list[Any]:
        """No objects of its own."""
        return []


Step = Operation | Late


def steps_of(graph: Graph, fetches: Sequence[Any], given: Collection[int]) -> list[Step]:
    """The steps of a run, in the order in which they were made.

    Args:
        graph: The graph.
        fetches: Tensors and operations.
        given: The ids of tensors that are fed.
    """
    found: dict[int, Step] = {}
    late: dict[int, Late] = {}
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
            todo.append(late.setdefault(id(tensor), Late(tensor, block)))
    return sorted(found.values(), key=lambda step: step.index)


def _from_blocks(
    graph: Graph, tensors: Sequence[Any], given: Collection[int], within: Block | None
) -> Iterator[tuple[Any, Block]]:
    """The tensors written in other blocks that tensors are made of, the nearest ones."""
    seen: set[int] = set()
    todo = list(tensors)
    while todo:
        tensor = todo.pop()
        node = node_of(tensor)
        if node is None or id(tensor) in given or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        block = graph.placed.get(node)
        if block is None or block is within:
            todo += node.input_tensors
        else:
            yield tensor, block
