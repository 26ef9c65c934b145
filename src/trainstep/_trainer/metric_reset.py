"""Resets all metrics of a model in one engine call.

Assigning one Keras variable takes about ten times as long as a step spends on it, and every epoch
resets the metrics. Keras's own metrics always reset to the same values, which are recorded once. A
metric of the user may do anything in `reset_state`, so that method is called every time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras import ops

from trainstep import _engines


class MetricReset:
    """Resets the metrics of a model, and stores the values that they reset to."""

    def __init__(self) -> None:
        self._recorded_for: list[Any] = []  # the metric variables when the values were recorded
        self._variables: list[Any] = []
        self._values: list[Any] = []

    def __call__(self, model: Any) -> None:
        """Resets the metrics of a model."""
        if getattr(model.reset_metrics, "__func__", None) is not keras.Model.reset_metrics:
            model.reset_metrics()  # overridden by the user
            return
        own: list[Any] = []
        for metric in _single_metrics(model.metrics):
            if _is_keras(metric):
                own.append(metric)
            else:
                metric.reset_state()
        variables = [v for metric in own for v in metric.variables]
        if list(map(id, variables)) != list(map(id, self._recorded_for)):
            self._recorded_for = variables
            self._variables, self._values = _record_reset(own, variables)
        _engines.current().assign(self._variables, self._values)


def _record_reset(metrics: Sequence[Any], variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the variables that a reset of metrics writes, and the values."""
    with keras.StatelessScope() as scope:
        for metric in metrics:
            metric.reset_state()
        values = {id(v): (v, scope.get_current_value(v)) for v in variables}
    written = [(v, ops.convert_to_numpy(x)) for v, x in values.values() if x is not None]
    return [v for v, _ in written], [x for _, x in written]


def _single_metrics(metrics: Sequence[Any]) -> Iterator[Any]:
    """Yields the metrics, with Keras's collections replaced by their members."""
    for metric in metrics:
        if type(metric).__module__ == "keras.src.trainers.compile_utils":
            yield from _single_metrics(metric.metrics)
        else:
            yield metric


def _is_keras(metric: Any) -> bool:
    """Whether `reset_state` of a metric is Keras's own."""
    module = getattr(type(metric).reset_state, "__module__", "")
    return module.startswith("keras.src.metrics.") and "reset_state" not in vars(metric)
