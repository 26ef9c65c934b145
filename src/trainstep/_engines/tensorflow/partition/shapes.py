"""TensorFlow: infers the shapes of a recorded step, without running it.

A record may have unknown dimensions. Its graph is imported with sample sizes, and TensorFlow infers
all shapes; with two samples, to distinguish an axis that grows with the batch from one that has the
same length by chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from trainstep._engines.contract import Refused, Tensor
from trainstep._engines.shared.row_cuts import Cut, reshaped
from trainstep._engines.tensorflow.private import tensor_util

# Sample values of dynamic sizes: primes, so that no product of others is a multiple of one, and
# small, so that products fit into an int32.
_LARGE, _SMALL = (211, 223, 227, 229), (5, 7, 11, 13)
_LARGEST_CONSTANT = 64  # elements; larger captured constants are not shapes or axes
_READS = "ReadVariableOp"


class Shapes:
    """The shapes and constant values of the tensors of a record.

    Args:
        graph: The record.
        given: The placeholders of the arguments.
        sizes: For each sample: the shapes of the arguments, and the number of rows.

    Attributes:
        rows: The number of rows in the first sample.
    """

    def __init__(
        self, graph: Any, given: Sequence[Tensor], sizes: Sequence[tuple[list[list[int]], int]]
    ) -> None:
        self._samples = [_imported(graph, given, shapes) for shapes, _ in sizes]
        self._rows = [rows for _, rows in sizes]
        self.rows = self._rows[0]

    def shape(self, tensor: Tensor) -> tuple[int, ...] | None:
        """Returns the shape in the first sample; None if it is unknown, or the rank differs."""
        found = [_shape(sample, tensor) for sample in self._samples]
        first = found[0]
        if None in found or len({len(shape) for shape in found if shape is not None}) > 1:
            return None
        return first

    def value(self, tensor: Tensor) -> Any:
        """Returns the value of a constant tensor, as a list or number; None if it is unknown."""
        found = [_value(sample, tensor) for sample in self._samples]
        return found[0] if all(each == found[0] for each in found) else None

    def is_cut(self, tensor: Tensor, cut: Cut) -> bool:
        """Whether a tensor has the length of a cut along its axis, in all samples."""
        shapes = [_shape(sample, tensor) for sample in self._samples]
        return all(
            shape is not None and shape[cut.axis] == rows * cut.unit
            for shape, rows in zip(shapes, self._rows, strict=True)
        )

    def reshaped(self, before: Tensor, cut: Cut, after: Tensor) -> Cut | None:
        """Returns the cut of a tensor after a reshape."""
        found = set()
        for sample, rows in zip(self._samples, self._rows, strict=True):
            old, new = _shape(sample, before), _shape(sample, after)
            found.add(None if old is None or new is None else reshaped(old, cut, new, rows))
        return found.pop() if len(found) == 1 else None


def sample_sizes(
    leaves: Sequence[Any], axes: Sequence[Sequence[str | None]] | None, rows: int
) -> list[tuple[list[list[int]], int]]:
    """Returns the samples: the sizes of the arguments, or two sets of values of dynamic sizes.

    Args:
        leaves: The arguments.
        axes: The names of the dynamic sizes, see `Engine.trace`.
        rows: The number of rows of the batch.
    """
    if axes is None:
        return [([list(leaf.shape) for leaf in leaves], rows)]
    names = list(dict.fromkeys(name for of in axes for name in of if name))
    if len(names) > len(_LARGE):
        raise Refused(f"more than {len(_LARGE)} dynamic sizes on several devices")
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
    """Imports the graph, with arguments of these shapes."""
    sample = tf.Graph()
    with sample.as_default():
        sizes = {id(tensor): shape for tensor, shape in zip(given, shapes, strict=True)}
        known: dict[str, Tensor] = {}
        for tensor in given:
            known[tensor.name] = tf.compat.v1.placeholder(tensor.dtype, sizes[id(tensor)])
        for outside, inside in graph.captures:
            if inside.dtype != tf.resource and math.prod(outside.shape) <= _LARGEST_CONSTANT:
                known[inside.name] = tf.constant(outside.numpy())
        for op in graph.get_operations():
            if op.type == _READS:
                (value,) = op.outputs
                known[value.name] = tf.compat.v1.placeholder(value.dtype, value.shape)
        try:
            tf.graph_util.import_graph_def(graph.as_graph_def(), input_map=known, name="")
        except ValueError as error:
            raise Refused(f"a dynamic size ({str(error).splitlines()[0]})") from error
    sample.known = known
    return sample


def _tensor(sample: Any, tensor: Tensor) -> Tensor:
    known = sample.known.get(tensor.name)
    return sample.get_tensor_by_name(tensor.name) if known is None else known


def _shape(sample: Any, tensor: Tensor) -> tuple[int, ...] | None:
    shape = _tensor(sample, tensor).shape
    return tuple(shape.as_list()) if shape.is_fully_defined() else None


def _value(sample: Any, tensor: Tensor) -> Any:
    found = tf.get_static_value(_tensor(sample, tensor))
    if found is None and tensor_util is not None:
        found = tensor_util.try_evaluate_constant(_tensor(sample, tensor))
    return None if found is None else found.tolist()
