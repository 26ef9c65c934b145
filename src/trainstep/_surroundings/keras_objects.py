"""The methods that Keras runs, and the settings that it reads, of layers, losses and optimizers."""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Iterator
from typing import Any

from trainstep._common import user_code
from trainstep._surroundings.value_kinds import class_attribute, is_users_function

# The methods of a user's class that Keras runs in a step.
_METHODS = (
    "call",
    "__call__",
    "update_state",
    "result",
    "update_step",
    "compute_loss",
    "compute_metrics",
)


_LAYER = ("layers.Layer",)
_OPTIMIZERS = ("optimizers.Optimizer", "optimizers.schedules.LearningRateSchedule")
_HELPERS = ("regularizers.Regularizer", "constraints.Constraint")
_KERAS = (*_LAYER, "losses.Loss", "metrics.Metric", *_OPTIMIZERS, *_HELPERS)


def is_keras(value: Any) -> bool:
    """Whether a value is a Keras object: a layer, a loss, an optimizer and the like."""
    return _is_instance(value, _KERAS)


def is_variable(value: Any) -> bool:
    """Whether a value is a Keras variable."""
    return _is_instance(value, ("Variable",))


def _is_instance(value: Any, names: tuple[str, ...]) -> bool:
    """Whether a value is an instance of a Keras class; False as long as Keras is not imported."""
    return isinstance(value, _classes(names)) if "keras" in sys.modules else False


def _classes(names: tuple[str, ...]) -> tuple[type, ...]:
    try:
        return _resolve(names)
    except AttributeError:  # Keras is being imported
        return ()


@functools.cache
def _resolve(names: tuple[str, ...]) -> tuple[type, ...]:
    return tuple(operator.attrgetter(name)(sys.modules["keras"]) for name in names)


def layers_of(value: Any) -> list[Any]:
    """An object, and the layers inside if it is a layer."""
    return list(value._flatten_layers()) if _is_instance(value, _LAYER) else [value]


def called_by_keras(value: Any) -> Iterator[types.FunctionType]:
    """The methods of an object that Keras runs."""
    for name in _METHODS:
        own = class_attribute(value, name)
        if isinstance(own, types.FunctionType):
            yield own


def settings(value: Any) -> Iterator[tuple[str, Any, bool]]:
    """The attributes of an object that Keras reads: name, value, and whether to analyze the value.

    The code of a user's class shows its own reads. Of Keras's own classes, numbers and functions
    are settings; of layers with weights only floats, since integers determined weight shapes.
    """
    own = type(value).__module__.partition(".")[0] == "keras"
    numbers = _numbers(value)
    for name, held in list(vars(value).items()):
        # Keras stores wrappers of some methods in the layer, under the names of the methods.
        if is_keras(held):
            # Not the optimizer or losses of a model: the step may use others.
            inside = _is_instance(held, _HELPERS) or not _is_instance(value, _LAYER)
            if inside and not _is_instance(held, _LAYER):
                yield name, held, True
        elif name.startswith("_") or class_attribute(value, name) is not None:
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
    if _is_instance(value, _OPTIMIZERS):
        return (float, int, bool, type(None))
    if _is_instance(value, _LAYER) and value.variables:
        return (float,)
    return (float, int)


def _is_users_object(value: Any) -> bool:
    call = class_attribute(value, "__call__")
    return isinstance(call, types.FunctionType) and user_code.is_users_file(call.__code__)
