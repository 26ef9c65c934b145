"""TensorFlow: what a step must not do, and what Keras gets wrong, while sizes are unknown.

One graph with unknown dimensions serves all sizes. In it `x.shape[0]` is None, and Python that
looks at it may take another way than it would for a size, in silence. So a look from the user's
own code refuses the record. And where Keras itself mistakes an unknown dimension, it is stopped or
put right for the time of the trace.
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
from keras.src import backend
from keras.src.trainers.compile_utils import CompileLoss

from trainstep._common import user_code
from trainstep._engines.contract import Axes, Refused
from trainstep._engines.shared.patching import replaced

_local = threading.local()


def specs(leaves: Sequence[Any], axes: Axes) -> list[Any]:
    """What the graph takes: unknown dimensions where sizes vary."""
    return [
        tf.TensorSpec(
            [None if name else size for size, name in zip(leaf.shape, names, strict=True)],
            leaf.dtype,
        )
        for leaf, names in zip(leaves, axes, strict=True)
    ]


def lengths() -> contextlib.AbstractContextManager[None]:
    """Lets `len` tell how many rows a tensor has while it is traced, as on the other engines."""
    return replaced([(tf.Tensor, "__len__", _length)])


@contextlib.contextmanager
def unknown_sizes() -> Iterator[None]:
    """Guards a trace with unknown sizes, in this thread."""
    _local.tracing = True
    try:
        with replaced(
            [
                (keras.layers.TimeDistributed, "call", _stopped_time_distributed),
                (CompileLoss, "call", _counted_loss),
                (backend.numpy, "array_split", _stopped_array_split),
                *((tf.TensorShape, name, _guarded) for name in ("__getitem__", "__iter__")),
                *((tf.TensorShape, name, _guarded_whole) for name in _WHOLE),
                (tf.TensorShape, "dims", _guarded_dims),
            ]
        ):
            yield
    finally:
        _local.tracing = False


def _guarded(original: Any) -> Any:
    """Stops the user's own Python from looking at a dimension that is unknown."""

    def look(self: Any, *args: Any) -> Any:
        found = original(self, *args)
        users = getattr(_local, "tracing", False) and user_code.is_outside(sys._getframe(1))
        if users and _is_unknown(self if isinstance(found, Iterator) else found):
            raise Refused("`shape` of a size that varies; use `keras.ops.shape`")
        return found

    return look


def _length(original: Any) -> Any:
    def length(self: Any) -> int:
        rows: int | None = self.shape[0] if self.shape.rank else None
        if rows is not None:
            return rows
        if getattr(_local, "tracing", False) and self.shape.rank:
            raise Refused("`len` of a size that varies; use `keras.ops.shape`")
        return original(self)  # type: ignore[no-any-return]  # says that there is none

    return length


# What looks at all dimensions of a shape.
_WHOLE = (
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


def _guarded_whole(original: Any) -> Any:
    def look(self: Any, *args: Any) -> Any:
        users = getattr(_local, "tracing", False) and user_code.is_outside(sys._getframe(1))
        shapes = [each for each in (self, *args) if isinstance(each, tf.TensorShape)]
        if users and any(map(_is_unknown, shapes)) and not user_code.is_shown():
            raise Refused("`shape` of a size that varies; use `keras.ops.shape`")
        return original(self, *args)

    return look


def _guarded_dims(original: Any) -> Any:
    return property(_guarded_whole(original.fget))


def _stopped_array_split(original: Any) -> Any:
    """Keras gives the whole as one piece when its size is unknown."""

    def array_split(x: Any, indices_or_sections: Any, axis: int = 0) -> Any:
        if getattr(_local, "tracing", False) and x.shape[axis] is None:
            raise Refused("`array_split` along an axis whose size varies")
        return original(x, indices_or_sections, axis=axis)

    return array_split


def _is_unknown(found: Any) -> bool:
    dims = found._dims if isinstance(found, tf.TensorShape) else found
    return None in dims if isinstance(dims, (list, tuple)) else dims is None


def _stopped_time_distributed(original: Any) -> Any:
    """Keras maps over the batch instead of the time axis when that is unknown."""

    def call(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(_local, "tracing", False) and inputs.shape[1] is None:
            raise Refused(f"`TimeDistributed` {self.name!r} along an axis whose size varies")
        return original(self, inputs, *args, **kwargs)

    return call


def _counted_loss(original: Any) -> Any:
    """Keras counts every batch as one sample in the losses of outputs when its size is unknown."""

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
    """Lets a metric count samples where it is told nothing."""
    update = metric.update_state

    def counted(values: Any, sample_weight: Any = None) -> Any:
        return update(values, sample_weight=count if sample_weight is None else sample_weight)

    vars(metric)["update_state"] = counted
    try:
        yield
    finally:
        del vars(metric)["update_state"]
