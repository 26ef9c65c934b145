"""TensorFlow: the tensors that stand in for Keras variables in a graph that is being traced.

TensorFlow's Keras optimizers call `assign_sub` and the like on what `variable.value` returns, as
it is a `tf.Variable` otherwise; the stand-in tensors carry those methods, which tell the scope.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.framework.ops import gradient_registry
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from trainstep._engines.contract import Tensor, Variable
from trainstep._state.scopes import Recorder, current_scope, initialize_pending


def prepare(recorder: Recorder, graph: Any, stand_ins: list[Tensor]) -> None:
    """Tells a recorder how variables are read and written in this graph."""

    def lift(variable: Variable) -> Tensor:
        if variable._value is None:
            with tf.init_scope(), tf.variable_creator_scope(_plain_variable):
                initialize_pending()
        # In the graph of the step, wherever the read is: a branch or a loop body captures it.
        with graph.as_default(), tf.control_dependencies(None):
            return stand_in(variable, variable._value.read_value())

    def stand_in(variable: Variable, value: Tensor) -> Tensor:
        tensor = tf.identity(value)
        tensor.__dict__.update(variable_methods(tensor, variable))
        stand_ins.append(tensor)
        return tensor

    recorder.home = graph
    recorder.lift, recorder.store = lift, stand_in
    recorder.note_read = pywrap_tfe.TFE_Py_TapeVariableAccessed


def let_go(graph: Any, stand_ins: list[Tensor]) -> None:
    """Takes away what would keep a traced graph alive when its program is dropped."""
    # The methods of a stand-in refer to it, and Python cannot see such a circle through a tensor.
    for tensor in stand_ins:
        tensor.__dict__.clear()
    # `tf.custom_gradient` registers a function for ever, and with it the graph that it was traced
    # in. The gradients of this graph have been taken.
    registry = gradient_registry._registry
    for name in [n for n in registry if n.startswith("CustomGradient-")]:
        if _mentions(registry[name]["type"], graph):
            registry.pop(name, None)


def _mentions(fn: Any, graph: Any, depth: int = 3) -> bool:
    """Whether a function closes over a tensor of this graph."""
    for cell in getattr(fn, "__closure__", None) or ():
        held = cell.cell_contents
        for each in held if isinstance(held, (list, tuple)) else (held,):
            if isinstance(each, tf.Tensor) and getattr(each, "graph", None) is graph:
                return True
            if depth and callable(each) and _mentions(each, graph, depth - 1):
                return True
    return False


def _plain_variable(next_creator: Any, **kwargs: Any) -> Any:
    """Makes a variable outside the graph that is being traced.

    The creator that `tf.function` installs would note it as the function's own and trace again.

    It has no name, by which TensorFlow would keep 34 KB for ever, also when the variable is gone:
    Keras knows it by a path of its own.
    """
    kwargs.pop("experimental_enable_variable_lifting", None)
    kwargs["name"] = None
    with tf.compat.v1.name_scope(None):  # names of where the trace is would count, too
        return ResourceVariable(**kwargs)


def variable_methods(tensor: Tensor, variable: Variable) -> dict[str, Any]:
    """What a tensor needs to stand in for a `tf.Variable` before Keras's optimizers."""

    def now() -> Tensor:
        return current_scope().get_current_value(variable)

    def write(value: Tensor) -> None:
        current_scope().add_update((variable, tf.cast(value, tensor.dtype)))

    def scatter(operation: Any, slices: tf.IndexedSlices) -> None:
        write(operation(now(), slices.indices[:, None], tf.cast(slices.values, tensor.dtype)))

    return {
        "assign": lambda value, **_: write(value),
        "assign_add": lambda value, **_: write(now() + tf.cast(value, tensor.dtype)),
        "assign_sub": lambda value, **_: write(now() - tf.cast(value, tensor.dtype)),
        "scatter_update": partial(scatter, tf.tensor_scatter_nd_update),
        "scatter_add": partial(scatter, tf.tensor_scatter_nd_add),
        "scatter_sub": partial(scatter, tf.tensor_scatter_nd_sub),
        "_unique_id": variable._value._unique_id,
        # A plain `tf.GradientTape` in a step watches what it sees read, and looks for a handle.
        "handle": tensor,
        "trainable": variable.trainable,
    }
