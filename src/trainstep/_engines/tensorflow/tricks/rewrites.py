"""Trick: replaces max pooling in a recorded step by operations that XLA runs faster on a CPU.

    graph --each operation: a call of a function instead, or itself--> equivalent graph

XLA iterates over the windows of a pooling one by one, and again for its gradient, which takes as
long as the rest of a small convnet. Where windows do not overlap, a reshape makes the positions in
a window axes of their own, and pooling is a maximum over these axes.

It does not apply on other devices, nor to windows that overlap or are padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from trainstep._engines.contract import Tensor

Function = Callable[..., Tensor]


def rewritten(concrete: Any) -> Any:
    """Returns an equivalent recorded function that XLA runs faster; itself if nothing changes."""
    graph = concrete.graph
    if any(device.device_type != "CPU" for device in tf.config.get_visible_devices()):
        return concrete
    found = {op.name: (op, fn) for op in graph.get_operations() if (fn := _replacement(op))}
    if not found:
        return concrete
    given, definition = list(concrete.inputs), graph.as_graph_def()
    made = {name: _recorded(fn, op.inputs) for name, (op, fn) in found.items()}
    for node in definition.node:
        if node.name in found:
            _replace_by_call(node, found[node.name][0], made[node.name])
    definition.library.function.extend(each.function_def for each in made.values())
    placeholders = {tensor.op.name for tensor in given}
    kept = [node for node in definition.node if node.name not in placeholders]
    del definition.node[:]
    definition.node.extend(kept)

    def run(*tensors: Tensor) -> list[Tensor]:
        here = tf.compat.v1.get_default_graph()
        inputs = [*tensors, *map(here.capture, concrete.captured_inputs)]
        known = {inside.name: x for inside, x in zip(given, inputs, strict=True)}
        names = [tensor.name for tensor in concrete.outputs]
        returned: list[Tensor] = tf.graph_util.import_graph_def(
            definition, input_map=known, return_elements=names, name=""
        )
        return returned

    new = _recorded(run, given[: len(given) - len(concrete.captured_inputs)])
    new.functions = made  # TensorFlow deletes unreferenced functions
    return new


def _recorded(fn: Function, inputs: Sequence[Tensor]) -> Any:
    """Returns a concrete function for such inputs."""
    specs = [tf.TensorSpec(x.shape, x.dtype) for x in inputs]
    return tf.function(fn, autograph=False).get_concrete_function(*specs)


def _replace_by_call(node: Any, op: Any, made: Any) -> None:
    """Turns an operation into a call of a function, in the definition of its graph."""
    node.op = "PartitionedCall"
    node.attr.clear()
    node.attr["Tin"].list.type.extend(x.dtype.as_datatype_enum for x in op.inputs)
    node.attr["Tout"].list.type.extend(x.dtype.as_datatype_enum for x in op.outputs)
    node.attr["f"].func.name = made.function_def.signature.name


def _replacement(op: Any) -> Function | None:
    """Returns a faster function for an operation, if there is one."""
    if op.type not in ("MaxPool", "MaxPoolGrad"):
        return None
    window, shape = op.get_attr("ksize"), op.inputs[0].shape
    if (
        op.get_attr("strides") != window
        or op.get_attr("padding") != b"VALID"
        or op.get_attr("data_format") != b"NHWC"
        or window[0] != 1
        or window[3] != 1
        or None in shape.as_list()[1:]
        or any(size < part for size, part in zip(shape[1:3], window[1:3], strict=True))
        or not op.inputs[0].dtype.is_floating
    ):
        return None
    windows = _Windows(shape.as_list(), window[1:3])
    return windows.largest if op.type == "MaxPool" else windows.slopes


class _Windows:
    """Windows that tile images; rows and columns that do not fill a window are dropped."""

    def __init__(self, shape: Sequence[int], window: Sequence[int]) -> None:
        _, self._height, self._width, self._channels = shape
        self._window = window
        self._counts = self._height // window[0], self._width // window[1]

    def _split_windows(self, images: Tensor) -> Tensor:
        """Splits rows into windows and rows of a window, and columns likewise."""
        (rows, columns), (down, across) = self._window, self._counts
        covered = images[:, : down * rows, : across * columns]
        return tf.reshape(covered, (-1, down, rows, across, columns, self._channels))

    def largest(self, images: Tensor) -> Tensor:
        """Returns the maximum of each window."""
        return tf.reduce_max(self._split_windows(images), (2, 4))

    def slopes(self, images: Tensor, largest: Tensor, slopes: Tensor) -> Tensor:
        """Routes the gradient of each window to the first position of its maximum."""
        (rows, columns), (down, across) = self._window, self._counts

        def spread(x: Tensor) -> Tensor:
            return tf.reshape(x, (-1, down, 1, across, 1, self._channels))

        # Earlier positions rank higher, and positions of the maximum above all others: the position
        # of the highest rank is unique.
        count = rows * columns
        order = (count - np.arange(count, dtype=np.float32)).reshape(1, 1, rows, 1, columns, 1)
        places = tf.where(self._split_windows(images) == spread(largest), order + count, order)
        first = places == tf.reduce_max(places, (2, 4), keepdims=True)
        sent = tf.where(first, spread(slopes), tf.zeros((), slopes.dtype))
        images_again = tf.reshape(sent, (-1, down * rows, across * columns, self._channels))
        rest = self._height - down * rows, self._width - across * columns
        if not any(rest):
            return images_again
        return tf.pad(images_again, [(0, 0), (0, rest[0]), (0, rest[1]), (0, 0)])
