"""Trick: records a layer's batch normalization as TensorFlow's fused operation.

    mean and variance of x, then x normalized by them --> FusedBatchNorm of x

Keras uses single operations: two passes over the data for the statistics, several for the rest, and
as many for the gradients, which take longer than the convolutions of a small network on a CPU. The
fused operation has the same result, up to the order of sums, and returns the statistics too: after
all gradients are recorded, readers of Keras's statistics (moving averages) are connected to these,
and Keras's are not computed.

It applies only inside of Keras's own layer, from its mean to its result, without renormalization,
in float32, on a CPU. It does not apply to XLA, which lacks the operation: XLA would compute the
variance in one pass, as a difference of large numbers if the mean is large.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from keras.layers import BatchNormalization

from trainstep._common.keras_private import backend
from trainstep._engines.contract import Tensor
from trainstep._engines.shared.patching import replaced

Statistics = tuple[Tensor, Tensor]  # the mean and the variance of each channel


class FusedNorms:
    """The batch normalizations of one step that is being recorded, in this thread."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        # The input and the statistics of the current layer.
        self._measured: tuple[Tensor, Statistics] | None = None
        self._is_in_layer = False
        self._replacements: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Replaces the functions of Keras's layer in this block, if all devices are CPUs."""
        if any(device.device_type != "CPU" for device in tf.config.get_visible_devices()):
            yield
            return
        try:
            with replaced(
                [
                    (BatchNormalization, "call", self._layer),
                    (backend.nn, "moments", self._moments),
                    (backend.nn, "batch_normalization", self._batch_normalization),
                ]
            ):
                yield
        finally:
            self._replacements.clear()  # a tensor keeps its graph alive

    def settle(self, graph: Any) -> None:
        """Replaces Keras's statistics by those of the fused operations, after all gradients."""
        for old, new in self._replacements:
            if old.graph is not graph:  # it belongs to a branch, which is already a function
                continue
            for reader in old.consumers():
                for index, read in enumerate(reader.inputs):
                    if read is old:
                        reader._update_input(index, new)

    def _layer(self, original: Any) -> Any:
        @functools.wraps(original)
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return original(layer, *args, **kwargs)
            before = self._is_in_layer
            # Renormalization computes the scale from the statistics, which would be a cycle.
            self._is_in_layer = type(layer) is BatchNormalization and not layer.renorm
            try:
                return original(layer, *args, **kwargs)
            finally:
                self._is_in_layer, self._measured = before, None

        return call

    def _moments(self, original: Any) -> Any:
        def moments(x: Any, axes: Any, *how: Any, **more: Any) -> Statistics:
            mean, variance = original(x, axes, *how, **more)
            if threading.get_ident() == self._thread:
                fits = self._is_in_layer and not any((*how, *more.values()))
                self._measured = (
                    (x, (mean, variance)) if fits and _is_per_channel(x, axes) else None
                )
            return mean, variance

        return moments

    def _batch_normalization(self, original: Any) -> Any:
        def batch_normalization(x: Any, mean: Any, *how: Any, **more: Any) -> Tensor:
            of, statistics = self._measured or (None, (None, None))
            here = threading.get_ident() == self._thread
            if not here or of is not x or mean is not statistics[0]:
                return original(x, mean, *how, **more)
            normalized, *new = _fused(x, *how[2:], **more)  # skips the variance and the axis
            self._replacements.extend(zip(statistics, new, strict=True))
            return normalized

        return batch_normalization


def _is_per_channel(x: Any, axes: Sequence[int]) -> bool:
    """Whether statistics along axes are per channel, and the fused operation supports them."""
    return (
        tf.is_symbolic_tensor(x)
        and x.dtype == tf.float32
        and x.shape.rank is not None
        and x.shape[-1] is not None
        and sorted(axis % x.shape.rank for axis in axes) == list(range(x.shape.rank - 1))
    )


def _fused(
    x: Tensor, offset: Any = None, scale: Any = None, epsilon: float = 1e-3
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the normalized tensor, the mean and the variance."""
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
    # The operation returns the unbiased variance; Keras uses the biased one.
    count = tf.cast(tf.size(x) // channels, tf.float32)
    variance = variance * ((count - 1) / count)
    return normalized if images is x else tf.reshape(normalized, tf.shape(x)), mean, variance
