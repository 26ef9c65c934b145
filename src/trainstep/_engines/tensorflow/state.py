"""TensorFlow: the tensors that stand in for Keras variables in a graph that is being traced.

Keras optimizers on TensorFlow call `assign_sub` and similar methods on `variable.value`, which is a
`tf.Variable` outside of traces. The stand-in tensors have these methods too; they update the scope.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import tensorflow as tf

from trainstep._engines.contract import Tensor, Variable
from trainstep._engines.tensorflow import private
from trainstep._state.scopes import Recorder, current_scope, initialize_pending


def prepare(recorder: Recorder, graph: Any, stand_ins: list[Tensor]) -> None:
    """Sets up a recorder to read and write variables in this graph."""

    def lift(variable: Variable) -> Tensor:
        if variable._value is None:
            with tf.init_scope(), tf.variable_creator_scope(_plain_variable):
                initialize_pending()
        # In the graph of the step, even if a branch or loop body reads it: they capture the value.
        with graph.as_default(), tf.control_dependencies(None):
            return stand_in(variable, variable._value.read_value())

    def stand_in(variable: Variable, value: Tensor) -> Tensor:
        tensor = tf.identity(value)
        tensor.__dict__.update(variable_methods(tensor, variable))
        stand_ins.append(tensor)
        return tensor

    recorder.home = graph
    recorder.lift, recorder.store = lift, stand_in
    if private.pywrap_tfe is not None:
        recorder.note_read = private.pywrap_tfe.TFE_Py_TapeVariableAccessed


def release_graph(graph: Any, stand_ins: list[Tensor]) -> None:
    """Removes references that would keep a traced graph alive after its program is deleted."""
    # The methods of a stand-in refer to it; Python's GC does not see cycles through a tensor.
    for tensor in stand_ins:
        tensor.__dict__.clear()
    # `tf.custom_gradient` registers a function for ever, and so the graph that it was traced in.
    # No more gradients are computed in this graph.
    registry = {} if private.ops is None else private.ops.gradient_registry._registry
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
    """Creates a variable outside of the graph that is being traced.

    The creator that `tf.function` installs would register it as the function's own and retrace.

    It has no name: TensorFlow keeps 34 KB per name for ever, even after the variable is deleted,
    and Keras identifies it by its path.
    """
    kwargs.pop("experimental_enable_variable_lifting", None)
    kwargs["name"] = None
    with tf.compat.v1.name_scope(None):  # the name scope of the trace is a name as well
        return variable_class()(**kwargs)


@functools.cache
def variable_class() -> Any:
    """Returns the class of variables; to be called outside of traces first.

    A creator cannot call `tf.Variable`, which would call the creator.
    """
    found: Any = private.resource_variable_ops
    return type(tf.Variable(0.0)) if found is None else found.ResourceVariable


def variable_methods(tensor: Tensor, variable: Variable) -> dict[str, Any]:
    """Returns the attributes with which a tensor replaces a `tf.Variable` in Keras optimizers."""

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
        # A `tf.GradientTape` in a step watches the variables that are read, by their handles.
        "handle": tensor,
        "trainable": variable.trainable,
    }
