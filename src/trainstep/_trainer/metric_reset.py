"""Metrics set to their start, all at once.

To assign a number to a Keras variable takes some ten times as long as a step takes for it, and
metrics start anew at every epoch. Keras's own metrics always start from the same values: those are
found out once. A metric of the user's may do anything, so its own `reset_state` is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras import ops

from trainstep import _engines


class Starting:
    """Resets the metrics of a model, and remembers from what values they start."""

    def __init__(self) -> None:
        self._of: list[Any] = []  # the variables that the rest is about
        self._variables: list[Any] = []
        self._values: list[Any] = []

    def __call__(self, model: Any) -> None:
        """Sets the metrics of a model to their start."""
        if getattr(model.reset_metrics, "__func__", None) is not keras.Model.reset_metrics:
            model.reset_metrics()  # its own
            return
        own: list[Any] = []
        for metric in _each(model.metrics):
            if _is_keras(metric):
                own.append(metric)
            else:
                metric.reset_state()
        variables = [v for metric in own for v in metric.variables]
        if list(map(id, variables)) != list(map(id, self._of)):
            self._of, self._variables, self._values = variables, *_start(own, variables)
        _engines.current().assign(self._variables, self._values)


def _start(metrics: Sequence[Any], variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The variables that a reset of metrics writes, and what it writes."""
    with keras.StatelessScope() as scope:
        for metric in metrics:
            metric.reset_state()
        found = {id(v): (v, scope.get_current_value(v)) for v in variables}
    written = [(v, ops.convert_to_numpy(x)) for v, x in found.values() if x is not None]
    return [v for v, _ in written], [x for _, x in written]


def _each(metrics: Sequence[Any]) -> Iterator[Any]:
    """The metrics, and those inside Keras's collections of them."""
    for metric in metrics:
        if type(metric).__module__ == "keras.src.trainers.compile_utils":
            yield from _each(metric.metrics)
        else:
            yield metric


def _is_keras(metric: Any) -> bool:
    module = getattr(type(metric).reset_state, "__module__", "")
    return module.startswith("keras.src.metrics.") and "reset_state" not in vars(metric)
