"""What Keras runs and reads of the objects that a step uses: layers, losses, optimizers."""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Iterator
from typing import Any

from trainstep._common import user_code
from trainstep._surroundings.value_kinds import is_users_function, member

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


_LAYER = ("layers.Layer",)
_OPTIMIZING = ("optimizers.Optimizer", "optimizers.schedules.LearningRateSchedule")
_HELPING = ("regularizers.Regularizer", "constraints.Constraint")
_KERAS = (*_LAYER, "losses.Loss", "metrics.Metric", *_OPTIMIZING, *_HELPING)


def is_keras(value: Any) -> bool:
    """Whether a value is one of Keras's objects: a layer, a loss, an optimizer and the like."""
    return _is(value, _KERAS)


def is_variable(value: Any) -> bool:
    """Whether a value is a variable of Keras's."""
    return _is(value, ("Variable",))


def _is(value: Any, names: tuple[str, ...]) -> bool:
    """Whether a value is of one of Keras's classes; never, as long as nobody imported Keras."""
    return isinstance(value, _classes(names)) if "keras" in sys.modules else False


def _classes(names: tuple[str, ...]) -> tuple[type, ...]:
    try:
        return _found(names)
    except AttributeError:  # Keras is being imported
        return ()


@functools.cache
def _found(names: tuple[str, ...]) -> tuple[type, ...]:
    return tuple(operator.attrgetter(name)(sys.modules["keras"]) for name in names)


def parts(value: Any) -> list[Any]:
    """An object and the layers in it."""
    return list(value._flatten_layers()) if _is(value, _LAYER) else [value]


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
        if is_keras(held):
            # Not what hangs on a model: it may have been compiled with another optimizer.
            inside = _is(held, _HELPING) or not _is(value, _LAYER)
            if inside and not _is(held, _LAYER):
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
    if _is(value, _OPTIMIZING):
        return (float, int, bool, type(None))
    if _is(value, _LAYER) and value.variables:
        return (float,)
    return (float, int)


def _is_users_object(value: Any) -> bool:
    call = member(value, "__call__")
    return isinstance(call, types.FunctionType) and user_code.is_users_file(call.__code__)
