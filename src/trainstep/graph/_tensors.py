"""Tensors without values, and the operations that make them.

They are Keras's symbolic tensors, so `keras.ops`, layers and operators take them and give more of
them. A tensor of ours has an operation of its own that makes its value inside the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
from keras.src.ops.node import Node

from trainstep._explain.signature import array_text
from trainstep.graph._graph import Graph, get_default_graph
from trainstep.graph._indexing import has_tensors, taken

if TYPE_CHECKING:
    from trainstep.graph._session import Session


class Tensor(keras.KerasTensor):  # type: ignore[misc]
    """A symbolic tensor of a graph: what this module and operators on it make.

    Functions of `keras.ops` give plain symbolic tensors, which are as good, but for `eval`.
    """

    __array_ufunc__ = None  # `array + tensor` is ours, and not one sum per element of NumPy's
    graph: Graph
    is_named = False  # whether it is in the graph under its name
    is_column = False  # whether values of one axis are fed as `[n, 1]`

    def eval(self, feed_dict: Any = None, session: Session | None = None) -> Any:
        """Its value, in a session or in the default one."""
        from trainstep.graph._session import session_for

        return session_for(session, "Tensor.eval").run(self, feed_dict)

    @property
    def __jax_array__(self) -> Any:
        # Keras's raises, and JAX asks every operand that has one: without it, an array on the left
        # leaves the operator to us.
        raise AttributeError("__jax_array__")

    def __getitem__(self, key: Any) -> Any:
        keys = tuple(key) if isinstance(key, (list, tuple)) else (key,)
        if has_tensors(keys):
            return self._own(taken(self, keys))
        plain = isinstance(key, (int, list, tuple))
        return self._own(super().__getitem__(key if plain else (key,)))

    def _own(self, made: Any) -> Any:
        """What an operator made, as one of these."""
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


class Made(keras.Operation):  # type: ignore[misc]
    """An operation of ours, with one node.

    Attributes:
        kind: What it is called in a drawing.
    """

    kind = "node"
    is_read_late = False  # whether its value is not to be kept from before an update
    is_fed = False
    is_opaque = False  # whether it may read variables that nobody knows of
    is_fresh = False  # whether its results share no memory with what it takes
    is_random = False
    is_endless = False  # whether it is a loop of which nobody knows how many turns it may take
    inner: Sequence[Any] = ()  # the nodes of its branches or of its loop

    def uses(self) -> list[Any]:
        """Layers, variables and functions that it runs."""
        return []

    def own(self, *made: Any) -> None:
        """Makes tensors its outputs, of no inputs."""
        Node(operation=self, call_args=(), call_kwargs={}, outputs=list(made))

    def give(
        self, args: Sequence[Any], specs: Sequence[Any], name: str | None, cls: Any = None
    ) -> list[Any]:
        """The tensors that it makes, entered in the default graph."""
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
    """The node of Keras's that makes a tensor; None for one that nothing has made."""
    history = getattr(tensor, "_keras_history", None)
    if history is None or history.operation is None:
        return None
    return history.operation._inbound_nodes[history.node_index]


def label(value: Any) -> str:
    """What a tensor or an operation is called: of tensors that Keras made, their operation."""
    node = None if getattr(value, "is_named", False) else node_of(value)
    return str(value.name if node is None else node.operation.name)


def sizes(tensor: Any) -> str:
    """The dtype and the shape of a tensor: `float32[?,3]`."""
    return array_text(tuple(tensor.shape), tensor.dtype)


def describe(value: Any) -> str:
    """A tensor or an operation in a few words, for messages."""
    if isinstance(value, keras.KerasTensor):
        return f"`{label(value)}` {sizes(value)}"
    if isinstance(value, keras.Variable):
        return f"variable `{value.path}`"
    return f"`{name}`" if (name := getattr(value, "name", "")) else repr(value)
