"""TensorFlow: guards a trace with unknown dimensions, and corrects how Keras handles them.

One graph with unknown dimensions serves all dynamic sizes. In it `x.shape[0]` is None, and Python
code that reads it may silently branch differently. So a read by user code refuses the record. Where
Keras itself handles an unknown dimension wrong, it is refused or corrected during the trace.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from trainstep._common import user_code
from trainstep._common.keras_private import CompileLoss, backend
from trainstep._engines.contract import Axes, Refused
from trainstep._engines.shared.patching import replaced

_local = threading.local()


def specs(leaves: Sequence[Any], axes: Axes) -> list[Any]:
    """Returns the input specs of the graph, with unknown dimensions for dynamic sizes."""
    return [
        tf.TensorSpec(
            [None if name else size for size, name in zip(leaf.shape, names, strict=True)],
            leaf.dtype,
        )
        for leaf, names in zip(leaves, axes, strict=True)
    ]


def lengths() -> contextlib.AbstractContextManager[None]:
    """Makes `len` work on traced tensors, as on the other engines."""
    return replaced([(tf.Tensor, "__len__", _length)])


@contextlib.contextmanager
def unknown_sizes() -> Iterator[None]:
    """Guards a trace with unknown sizes, in this thread."""
    _local.tracing = True
    try:
        with replaced(
            [
                (keras.layers.TimeDistributed, "call", _refusing_time_distributed),
                (CompileLoss, "call", _counted_loss),
                (backend.numpy, "array_split", _refusing_array_split),
                *((tf.TensorShape, name, _refusing_item) for name in ("__getitem__", "__iter__")),
                *((tf.TensorShape, name, _refusing_shape) for name in _SHAPE_METHODS),
                (tf.TensorShape, "dims", _refusing_dims),
            ]
        ):
            yield
    finally:
        _local.tracing = False


def _refusing_item(original: Any) -> Any:
    """Refuses reads of an unknown dimension by user code."""

    def read(self: Any, *args: Any) -> Any:
        found = original(self, *args)
        users = getattr(_local, "tracing", False) and user_code.is_outside(sys._getframe(1))
        if users and _is_unknown(self if isinstance(found, Iterator) else found):
            raise Refused("`shape` of a dynamic size; use `keras.ops.shape`")
        return found

    return read


def _length(original: Any) -> Any:
    def length(self: Any) -> int:
        rows: int | None = self.shape[0] if self.shape.rank else None
        if rows is not None:
            return rows
        if getattr(_local, "tracing", False) and self.shape.rank:
            raise Refused("`len` of a dynamic size; use `keras.ops.shape`")
        return original(self)  # type: ignore[no-any-return]  # raises the usual error

    return length


# Methods that read all dimensions of a shape.
_SHAPE_METHODS = (
    "__eq__",
    "__ne__",
    "__hash__",
    "__repr__",
    "__str__",
    "as_list",
    "concatenate",
    "is_compatible_with",
    "is_fully_defined",
    "merge_with",
    "most_specific_compatible_shape",
    "num_elements",
)


def _refusing_shape(original: Any) -> Any:
    def read(self: Any, *args: Any) -> Any:
        users = getattr(_local, "tracing", False) and user_code.is_outside(sys._getframe(1))
        shapes = [each for each in (self, *args) if isinstance(each, tf.TensorShape)]
        if users and any(map(_is_unknown, shapes)) and not user_code.is_shown():
            raise Refused("`shape` of a dynamic size; use `keras.ops.shape`")
        return original(self, *args)

    return read


def _refusing_dims(original: Any) -> Any:
    return property(_refusing_shape(original.fget))


def _refusing_array_split(original: Any) -> Any:
    """Refuses: Keras returns the whole array as one piece when its size is unknown."""

    def array_split(x: Any, indices_or_sections: Any, axis: int = 0) -> Any:
        if getattr(_local, "tracing", False) and x.shape[axis] is None:
            raise Refused("`array_split` along an axis of dynamic size")
        return original(x, indices_or_sections, axis=axis)

    return array_split


def _is_unknown(found: Any) -> bool:
    dims = found._dims if isinstance(found, tf.TensorShape) else found
    return None in dims if isinstance(dims, (list, tuple)) else dims is None


def _refusing_time_distributed(original: Any) -> Any:
    """Refuses: Keras maps over the batch instead of the time axis when that is unknown."""

    def call(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(_local, "tracing", False) and inputs.shape[1] is None:
            raise Refused(f"`TimeDistributed` {self.name!r} along an axis of dynamic size")
        return original(self, inputs, *args, **kwargs)

    return call


def _counted_loss(original: Any) -> Any:
    """Corrects the losses of outputs: Keras counts a batch of unknown size as one sample."""

    def call(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if not getattr(_local, "tracing", False):
            return original(self, y_true, y_pred, sample_weight)
        count = tf.shape(tree.flatten(y_pred)[0])[0]
        with contextlib.ExitStack() as stack:
            for metric in self.metrics:
                stack.enter_context(_counting(metric, count))
            return original(self, y_true, y_pred, sample_weight)

    return call


@contextlib.contextmanager
def _counting(metric: Any, count: Any) -> Iterator[None]:
    """Makes a metric use `count` where it gets no sample weights."""
    update = metric.update_state

    def counted(values: Any, sample_weight: Any = None) -> Any:
        return update(values, sample_weight=count if sample_weight is None else sample_weight)

    vars(metric)["update_state"] = counted
    try:
        yield
    finally:
        del vars(metric)["update_state"]
