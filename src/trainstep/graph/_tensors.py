"""Symbolic tensors, and the operations that compute them.

A `Tensor` is a Keras symbolic tensor, so `keras.ops`, layers and operators accept it and return
symbolic tensors. A tensor of this module has a `NodeOperation` that computes its value in the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras

from trainstep._common.keras_private import Node
from trainstep._explain.signature import array_text
from trainstep.graph._graph import Graph, get_default_graph
from trainstep.graph._indexing import has_tensors, take

if TYPE_CHECKING:
    from trainstep.graph._session import Session


class Tensor(keras.KerasTensor):  # type: ignore[misc]
    """A symbolic tensor of a graph: a result of this module, or of an operator on one.

    Functions of `keras.ops` return plain symbolic tensors, which lack only `eval`.
    """

    # Without this, NumPy would compute `array + tensor` as one sum for each element.
    __array_ufunc__ = None
    graph: Graph
    is_named = False  # whether the graph has it under its name
    is_column = False  # whether a fed value of shape `[n]` becomes `[n, 1]`

    def eval(self, feed_dict: Any = None, session: Session | None = None) -> Any:
        """Returns its value, from the given session or the default session."""
        from trainstep.graph._session import session_for

        return session_for(session, "Tensor.eval").run(self, feed_dict)

    @property
    def __jax_array__(self) -> Any:
        # JAX calls `__jax_array__` of every operand that has one, and Keras's raises an error.
        # Without it, a JAX array on the left defers to our operator.
        raise AttributeError("__jax_array__")

    def __getitem__(self, key: Any) -> Any:
        keys = tuple(key) if isinstance(key, (list, tuple)) else (key,)
        if has_tensors(keys):
            return self._own(take(self, keys))
        plain = isinstance(key, (int, list, tuple))
        return self._own(super().__getitem__(key if plain else (key,)))

    def _own(self, made: Any) -> Any:
        """Converts the result of an operator to a `Tensor`."""
        if type(made) is keras.KerasTensor:
            made.__class__ = Tensor
            made.graph = self.graph
        return made


def _operator(name: str) -> Callable[..., Any]:
    plain = getattr(keras.KerasTensor, name)

    @functools.wraps(plain)
    def operator(self: Tensor, *args: Any) -> Any:
        return self._own(plain(self, *args))

    return operator


_BOTH = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_ONE = ("neg", "abs", "invert", "lt", "le", "gt", "ge")
for _name in (*_BOTH, *(f"r{each}" for each in _BOTH), *_ONE):
    if f"__{_name}__" in vars(keras.KerasTensor):
        setattr(Tensor, f"__{_name}__", _operator(f"__{_name}__"))


class NodeOperation(keras.Operation):  # type: ignore[misc]
    """A Keras operation of this module, with exactly one node.

    Attributes:
        kind: Its label in a drawing.
    """

    kind = "node"
    is_reread = False  # whether a block computes it again after updates
    is_fed = False
    is_opaque = False  # whether it may read variables that the graph does not know
    is_unaliased = False  # whether its outputs share no memory with its inputs
    is_random = False
    is_unbounded = False  # whether it is a loop without a fixed maximum of iterations
    inner: Sequence[Any] = ()  # the nodes of its branches or its loop

    def uses(self) -> list[Any]:
        """The layers, variables and functions that it runs."""
        return []

    def set_outputs(self, *made: Any) -> None:
        """Makes existing tensors its outputs; it has no inputs."""
        Node(operation=self, call_args=(), call_kwargs={}, outputs=list(made))

    def make_outputs(
        self, args: Sequence[Any], specs: Sequence[Any], name: str | None, cls: Any = None
    ) -> list[Any]:
        """Makes its output tensors, and registers them in the default graph."""
        graph = get_default_graph()
        made: list[Any] = []
        for spec in specs:
            tensor = (cls or Tensor)(tuple(spec.shape), spec.dtype)
            tensor.graph = graph
            tensor.name = graph.add(tensor, name, self.kind)
            tensor.is_named = True
            made.append(tensor)
        Node(operation=self, call_args=tuple(args), call_kwargs={}, outputs=made)
        if not self._inbound_nodes[-1].input_tensors:
            graph.sources += made
        return made


def node_of(tensor: Any) -> Any:
    """Returns the Keras node that computes a tensor, or None."""
    history = getattr(tensor, "_keras_history", None)
    if history is None or history.operation is None:
        return None
    return history.operation._inbound_nodes[history.node_index]


def label(value: Any) -> str:
    """Returns the name of a tensor or operation; for a Keras tensor, that of its operation."""
    node = None if getattr(value, "is_named", False) else node_of(value)
    return str(value.name if node is None else node.operation.name)


def spec_text(tensor: Any) -> str:
    """Returns the dtype and shape of a tensor as text: `float32[?,3]`."""
    return array_text(tuple(tensor.shape), tensor.dtype)


def describe(value: Any) -> str:
    """Describes a tensor, a variable or an operation in an error message."""
    if isinstance(value, keras.KerasTensor):
        return f"`{label(value)}` {spec_text(value)}"
    if isinstance(value, keras.Variable):
        return f"variable `{value.path}`"
    return f"`{name}`" if (name := getattr(value, "name", "")) else repr(value)
