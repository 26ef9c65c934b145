"""TensorFlow: the shapes of a recorded step for given sizes, without computing anything.

A record may have unknown dimensions. What becomes of them is found by importing its graph with
sizes put in, and letting TensorFlow infer the rest; with two different sizes, to tell an axis that
grows with the batch from one that only happens to be as long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import tensor_util

from trainstep._engines.contract import Refused, Tensor
from trainstep._engines.shared.row_cuts import Cut, reshaped

# Sizes to put in for those that vary: primes, so that no product of others is one of their
# multiples, and small, so that products fit into an int32.
_LARGE, _SMALL = (211, 223, 227, 229), (5, 7, 11, 13)
_LITTLE = 64  # numbers; larger constants from outside the graph are no shapes or axes
_READS = "ReadVariableOp"


class Shapes:
    """What is known of the tensors of a record.

    Args:
        graph: The record.
        given: The arguments' placeholders.
        sizes: For each way to look at it: the arguments' shapes, and the number of rows.

    Attributes:
        rows: The number of rows, in the first of them.
    """

    def __init__(
        self, graph: Any, given: Sequence[Tensor], sizes: Sequence[tuple[list[list[int]], int]]
    ) -> None:
        self._looks = [_imported(graph, given, shapes) for shapes, _ in sizes]
        self._rows = [rows for _, rows in sizes]
        self.rows = self._rows[0]

    def shape(self, tensor: Tensor) -> tuple[int, ...] | None:
        """The shape in the first look; None if it is not known, or does not follow the rows."""
        found = [_shape(look, tensor) for look in self._looks]
        first = found[0]
        if None in found or len({len(shape) for shape in found if shape is not None}) > 1:
            return None
        return first

    def value(self, tensor: Tensor) -> Any:
        """The value of a tensor of constants, as a list or number; None if it is not known."""
        found = [_value(look, tensor) for look in self._looks]
        return found[0] if all(each == found[0] for each in found) else None

    def is_cut(self, tensor: Tensor, cut: Cut) -> bool:
        """Whether a tensor has so many numbers for each row along an axis, for any size."""
        shapes = [_shape(look, tensor) for look in self._looks]
        return all(
            shape is not None and shape[cut.axis] == rows * cut.unit
            for shape, rows in zip(shapes, self._rows, strict=True)
        )

    def reshaped(self, before: Tensor, cut: Cut, after: Tensor) -> Cut | None:
        """How a tensor is cut after its axes were split or joined."""
        found = set()
        for look, rows in zip(self._looks, self._rows, strict=True):
            old, new = _shape(look, before), _shape(look, after)
            found.add(None if old is None or new is None else reshaped(old, cut, new, rows))
        return found.pop() if len(found) == 1 else None


def looks(
    leaves: Sequence[Any], axes: Sequence[Sequence[str | None]] | None, rows: int
) -> list[tuple[list[list[int]], int]]:
    """The sizes to look at: those of the arguments, or two others where they vary.

    Args:
        leaves: The arguments.
        axes: The names of the sizes that vary, as of `Engine.trace`.
        rows: How many rows the batch has.
    """
    if axes is None:
        return [([list(leaf.shape) for leaf in leaves], rows)]
    names = list(dict.fromkeys(name for of in axes for name in of if name))
    if len(names) > len(_LARGE):
        raise Refused("more sizes that vary than several devices take")
    found = []
    first = next((of[0] for of in axes if of), None)
    for chosen in (_LARGE, _SMALL):
        sizes = dict(zip(names, chosen, strict=False))
        shapes = [
            [sizes[name] if name else n for n, name in zip(leaf.shape, of, strict=True)]
            for leaf, of in zip(leaves, axes, strict=True)
        ]
        found.append((shapes, sizes[first] if first else rows))
    return found


def _imported(graph: Any, given: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Any:
    """The graph, with arguments of these shapes."""
    look = tf.Graph()
    with look.as_default():
        sizes = {id(tensor): shape for tensor, shape in zip(given, shapes, strict=True)}
        known: dict[str, Tensor] = {}
        for tensor in given:
            known[tensor.name] = tf.compat.v1.placeholder(tensor.dtype, sizes[id(tensor)])
        for outside, inside in graph.captures:
            if inside.dtype != tf.resource and math.prod(outside.shape) <= _LITTLE:
                known[inside.name] = tf.constant(outside.numpy())
        for op in graph.get_operations():
            if op.type == _READS:
                (value,) = op.outputs
                known[value.name] = tf.compat.v1.placeholder(value.dtype, value.shape)
        try:
            tf.graph_util.import_graph_def(graph.as_graph_def(), input_map=known, name="")
        except ValueError as error:
            raise Refused(f"a size that varies ({str(error).splitlines()[0]})") from error
    look.known = known
    return look


def _tensor(look: Any, tensor: Tensor) -> Tensor:
    known = look.known.get(tensor.name)
    return look.get_tensor_by_name(tensor.name) if known is None else known


def _shape(look: Any, tensor: Tensor) -> tuple[int, ...] | None:
    shape = _tensor(look, tensor).shape
    return tuple(shape.as_list()) if shape.is_fully_defined() else None


def _value(look: Any, tensor: Tensor) -> Any:
    found = tensor_util.constant_value(_tensor(look, tensor))
    if found is None:
        found = tensor_util.try_evaluate_constant(_tensor(look, tensor))
    return None if found is None else found.tolist()
