"""TensorFlow: a batch normalization recorded as the one operation that there is for it.

    mean and variance of x, then x normalized by them --> FusedBatchNorm of x

Keras writes it out: two passes over the data for the statistics, several for the rest, and as many
again for the gradients, which take longer than the convolutions of a small network on a CPU. The
one operation gives the same numbers, up to the order of its sums, and the statistics beside them:
once all gradients are taken, those who read Keras's (moving averages) read these instead, and
Keras's are not computed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from keras.src import backend

from trainstep._engines._base import Tensor
from trainstep._engines._patching import replaced

Statistics = tuple[Tensor, Tensor]  # the mean and the variance of each channel


class FusedNorms:
    """The batch normalizations of one step that is being recorded, in this thread."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._known: list[tuple[Tensor, Statistics]] = []
        self._instead: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Leads what Keras calls through here, where all devices are CPUs."""
        if any(device.device_type != "CPU" for device in tf.config.get_visible_devices()):
            yield
            return
        try:
            with replaced(
                [
                    (backend.nn, "moments", self._moments),
                    (backend.nn, "batch_normalization", self._batch_normalization),
                ]
            ):
                yield
        finally:
            self._known.clear()  # a tensor keeps its graph
            self._instead.clear()

    def settle(self, graph: Any) -> None:
        """Has the statistics of the operations read, not Keras's; all gradients are taken."""
        for old, new in self._instead:
            if old.graph is not graph:  # a branch, which is a function by now
                continue
            for reader in old.consumers():
                for index, read in enumerate(reader.inputs):
                    if read is old:
                        reader._update_input(index, new)

    def _moments(self, original: Any) -> Any:
        def moments(
            x: Any, axes: Sequence[int], keepdims: bool = False, synchronized: bool = False
        ) -> Statistics:
            mean, variance = original(x, axes, keepdims=keepdims, synchronized=synchronized)
            here = threading.get_ident() == self._thread
            if here and not keepdims and not synchronized and _is_of_channels(x, axes):
                self._known.append((x, (mean, variance)))
            return mean, variance

        return moments

    def _batch_normalization(self, original: Any) -> Any:
        def batch_normalization(
            x: Any, mean: Any, variance: Any, axis: int, *how: Any, **more: Any
        ) -> Tensor:
            known = any(
                of is x and its_mean is mean and its_variance is variance
                for of, (its_mean, its_variance) in self._known
            )
            given = [each for each in (*how, *more.values()) if tf.is_tensor(each)]
            if (
                not known
                or axis not in (-1, x.shape.rank - 1)
                or not all(_is_of_each_channel(each, x) for each in given)
                # What reads a statistic cannot be an input of the operation that it will read from.
                or self._come_from_any(given)
            ):
                return original(x, mean, variance, axis, *how, **more)
            normalized, *statistics = _fused(x, *how, **more)
            self._instead.extend(zip((mean, variance), statistics, strict=True))
            return normalized

        return batch_normalization

    def _come_from_any(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors are computed from statistics."""
        sources = {tensor.op for _, statistics in self._known for tensor in statistics}
        todo, seen = [tensor.op for tensor in tensors], set()
        while todo:
            op = todo.pop()
            if op in sources:
                return True
            if op not in seen:
                seen.add(op)
                todo.extend(tensor.op for tensor in op.inputs)
        return False


def _is_of_channels(x: Any, axes: Sequence[int]) -> bool:
    """Whether statistics along axes are those of channels, and there is an operation for them."""
    return (
        tf.is_symbolic_tensor(x)
        and x.dtype == tf.float32
        and x.shape.rank is not None
        and x.shape[-1] is not None
        and sorted(axis % x.shape.rank for axis in axes) == list(range(x.shape.rank - 1))
    )


def _is_of_each_channel(tensor: Any, x: Tensor) -> bool:
    return (
        tf.is_symbolic_tensor(tensor)
        and tensor.dtype == tf.float32
        and tuple(tensor.shape) == (x.shape[-1],)
    )


def _fused(
    x: Tensor, offset: Any = None, scale: Any = None, epsilon: float = 1e-3
) -> tuple[Tensor, Tensor, Tensor]:
    """A tensor normalized; the mean and the variance."""
    channels = x.shape[-1]
    images = x if x.shape.rank == 4 else tf.reshape(x, (-1, 1, 1, channels))
    normalized, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
        x=images,
        scale=tf.ones(channels) if scale is None else scale,
        offset=tf.zeros(channels) if offset is None else offset,
        mean=[],
        variance=[],
        epsilon=epsilon,
        is_training=True,
    )
    # The operation tells the unbiased variance, and Keras keeps the plain one.
    count = tf.cast(tf.size(x) // channels, tf.float32)
    variance = variance * ((count - 1) / count)
    return normalized if images is x else tf.reshape(normalized, tf.shape(x)), mean, variance
