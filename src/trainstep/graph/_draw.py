"""`draw`: the computation of a set of fetches, as text and as a picture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras

from trainstep._common.errors import ArgumentError
from trainstep._common.keras_private import to_snake_case
from trainstep._common.structure import leaves
from trainstep.graph._graph import Graph, get_default_graph
from trainstep.graph._operations import Operation
from trainstep.graph._plan import resolve
from trainstep.graph._run_order import steps_of
from trainstep.graph._svg import picture
from trainstep.graph._tensors import NodeOperation, label, spec_text
from trainstep.graph._traverse import needed


@dataclass
class Box:
    """A node or an operation in a drawing.

    Attributes:
        name: Its name.
        kind: Its kind: `placeholder`, `matmul`, `train`.
        detail: Its dtype and shape, or the variables that it sets.
        inputs: The boxes whose values it uses.
        after: The boxes that run before it.
        is_fetched: Whether it is a fetch.
        is_fed: Whether its value is fed.
    """

    name: str
    kind: str
    detail: str
    inputs: list[Box] = field(default_factory=list)
    after: list[Box] = field(default_factory=list)
    is_fetched: bool = False
    is_fed: bool = False


def draw(
    fetches: Any, file: str | os.PathLike[str] | None = None, feed_list: Sequence[Any] = ()
) -> str:
    """Shows the part of the graph that a set of fetches computes.

    Args:
        fetches: As in `Session.run`.
        file: The path of an SVG file to write.
        feed_list: Fed tensors other than placeholders: the nodes that they replace are omitted.

    Returns:
        A line for each tensor and operation, in the order of computation.

    Example:
        >>> from trainstep import graph
        >>> with graph.Graph().as_default():
        ...     x = graph.placeholder("float32", [None, 3], name="x")
        ...     print(graph.draw(graph.identity(x, name="copy")))
        x     placeholder  float32[?,3]        fed
        copy  identity     float32[?,3]  <- x  fetched
    """
    graph = get_default_graph()
    flat = [resolve(graph, each) for each in leaves(fetches)]
    boxes = _boxes(graph, flat, [resolve(graph, each) for each in feed_list])
    if file is not None:
        path = Path(file)
        if path.suffix.lower() != ".svg":
            raise ArgumentError(
                "graph.draw", "file", "a path that ends in .svg", str(file), "use `graph.svg`"
            )
        path.write_text(picture(boxes), encoding="utf-8")
    return _text(boxes)


def _boxes(graph: Graph, fetches: Sequence[Any], fed: Sequence[Any]) -> list[Box]:
    """Makes boxes, in topological order."""
    given = {id(tensor) for tensor in fed}
    steps = steps_of(graph, fetches, given)
    wanted = [t for t in fetches if isinstance(t, keras.KerasTensor)]
    wanted += [t for step in steps for t in step.inputs]
    by_tensor: dict[int, Box] = {}
    for tensor in wanted:
        if id(tensor) in given:
            by_tensor[id(tensor)] = Box(label(tensor), "fed", spec_text(tensor), is_fed=True)
    found: list[Box] = list(by_tensor.values())
    for node in needed(wanted, given):
        for tensor in node.input_tensors:
            if id(tensor) in given and id(tensor) not in by_tensor:
                by_tensor[id(tensor)] = Box(label(tensor), "fed", spec_text(tensor), is_fed=True)
                found.append(by_tensor[id(tensor)])
        box = _of_node(node)
        box.inputs = _distinct(by_tensor[id(t)] for t in node.input_tensors)
        found.append(box)
        by_tensor.update((id(t), box) for t in node.outputs)
    done: dict[int, Box] = {}
    for step in steps:
        if isinstance(step, Operation):
            reads = step.graph.reads
            writes = ", ".join(getattr(reads.get(id(v)), "name", v.path) for v in step.writes)
            box = Box(step.name, step.kind, f"sets {writes}" if writes else "")
            box.inputs = _distinct(by_tensor[id(t)] for t in step.inputs)
            found.append(box)
        else:
            box = by_tensor[id(step.inputs[0])]
        before = [*(step.block.after if step.block else ()), *step.parts]
        box.after = [done[id(each)] for each in before if id(each) in done]
        done[id(step)] = box
    for each in fetches:
        box = by_tensor[id(each)] if isinstance(each, keras.KerasTensor) else done[id(each)]
        box.is_fetched = True
    return found


def _of_node(node: Any) -> Box:
    operation, (first, *others) = node.operation, node.outputs
    detail = spec_text(first) + (f" and {len(others)} more" if others else "")
    if isinstance(operation, NodeOperation):
        return Box(first.name, operation.kind, detail, is_fed=operation.is_fed)
    kind = to_snake_case(type(operation).__name__)
    return Box(operation.name, kind, detail)


def _distinct(boxes: Any) -> list[Box]:
    return list({id(box): box for box in boxes}.values())


def _text(boxes: Sequence[Box]) -> str:
    rows = []
    for box in boxes:
        takes = f"<- {', '.join(each.name for each in box.inputs)}" if box.inputs else ""
        after = f"after {', '.join(each.name for each in box.after)}" if box.after else ""
        marks = "fed" if box.is_fed else "", "fetched" if box.is_fetched else ""
        last = ", ".join(filter(None, (*marks, after)))
        rows.append((box.name, box.kind, box.detail, takes, last))
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
