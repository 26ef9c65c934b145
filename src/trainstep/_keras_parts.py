"""What Keras runs and reads of the objects that a step uses: layers, losses, optimizers."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import keras

from trainstep import _site
from trainstep._places import is_users_function, member

_OPTIMIZING = (
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
)
_HELPING = (keras.regularizers.Regularizer, keras.constraints.Constraint)
KERAS = (
    keras.layers.Layer,
    keras.losses.Loss,
    keras.metrics.Metric,
    *_OPTIMIZING,
    *_HELPING,
)
# Which methods of a class of the user's Keras runs in a step.
_METHODS = (
    "call",
    "__call__",
    "update_state",
    "result",
    "update_step",
    "compute_loss",
    "compute_metrics",
)


def parts(value: Any) -> list[Any]:
    """An object and the layers in it."""
    return list(value._flatten_layers()) if isinstance(value, keras.layers.Layer) else [value]


def called_by_keras(value: Any) -> Iterator[types.FunctionType]:
    """The methods that Keras runs of an object."""
    for name in _METHODS:
        own = member(value, name)
        if isinstance(own, types.FunctionType):
            yield own


def settings(value: Any) -> Iterator[tuple[str, Any, bool]]:
    """What Keras reads of an object: a name, a value, and whether that is to be followed itself.

    Of a class of the user's, the code tells what is read. Of Keras's own, numbers and functions
    count: of layers with weights the floats, since their whole numbers shaped the weights.
    """
    own = type(value).__module__.partition(".")[0] == "keras"
    numbers = _numbers(value)
    for name, held in list(vars(value).items()):
        # Keras wraps some methods of a layer, and keeps them with it under their own names.
        if isinstance(held, KERAS):
            # Not what hangs on a model: it may have been compiled with another optimizer.
            inside = isinstance(held, _HELPING) or not isinstance(value, keras.layers.Layer)
            if inside and not isinstance(held, keras.layers.Layer):
                yield name, held, True
        elif name.startswith("_") or member(value, name) is not None:
            continue
        elif isinstance(held, types.FunctionType) and own and "function" not in name:
            yield name, held, False
            if is_users_function(held):
                yield name, held, True
        elif own and type(held) in numbers and name != "built":
            yield name, held, False
        elif callable(held) and _is_users_object(held):
            yield name, held, True


def _numbers(value: Any) -> tuple[type, ...]:
    if isinstance(value, _OPTIMIZING):
        return (float, int, bool, type(None))
    if isinstance(value, keras.layers.Layer) and value.variables:
        return (float,)
    return (float, int)


def _is_users_object(value: Any) -> bool:
    call = member(value, "__call__")
    return isinstance(call, types.FunctionType) and _site.is_users_file(call.__code__)
