"""Tensors without values: placeholders, variables, constants, random numbers, functions.

They are Keras's symbolic tensors, so `keras.ops`, layers and operators take them and give more of
them. A source has an operation of its own that makes its value inside the step, at every run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops
from keras.src.ops.node import Node

from trainstep._errors import ArgumentError
from trainstep._signature import array_text
from trainstep.graph._graphs import Block, Graph, get_default_graph

if TYPE_CHECKING:
    from trainstep.graph._session import Session


class Tensor(keras.KerasTensor):  # type: ignore[misc]
    """A symbolic tensor of a graph: what this module and operators on it make.

    Functions of `keras.ops` give plain symbolic tensors, which are as good, but for `eval`.
    """

    __array_ufunc__ = None  # `array + tensor` is ours, and not one sum per element of NumPy's
    graph: Graph
    is_named = False  # whether it is in the graph under its name

    def eval(self, feed_dict: Any = None, session: Session | None = None) -> Any:
        """Its value, in a session or in the default one."""
        from trainstep.graph._session import session_for

        return session_for(session, "Tensor.eval").run(self, feed_dict)

    def __getitem__(self, key: Any) -> Any:
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
        block: The block that it was written in, if its value depends on when it is computed.
    """

    kind = "node"
    block: Block | None = None
    index = 0
    is_read_late = False  # whether its value is not to be kept from before an update
    is_fed = False

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


class _Fed(Made):
    kind = "placeholder"
    is_fed = True

    def call(self) -> Any:  # pragma: no cover: a run asks for it first
        raise RuntimeError("a placeholder has no value")


def placeholder(dtype: Any, shape: Sequence[int | None], name: str | None = None) -> Tensor:
    """A tensor whose value is fed at every run.

    Args:
        dtype: Its dtype, as a string or NumPy's.
        shape: One entry per axis; None is any size.
        name: Its name, by which it can be fetched and fed.

    Example:
        >>> from trainstep import graph
        >>> x = graph.placeholder("float32", [None, 3], name="x")
        >>> y = 2 * x
        >>> graph.Session().run(y, {x: [[1.0, 2.0, 3.0]]}).tolist()
        [[2.0, 4.0, 6.0]]
    """
    if shape is None:
        raise ArgumentError(
            "graph.placeholder",
            "shape",
            "one entry per axis, None for any size",
            "None, which leaves the number of axes open",
            "say how many axes there are: `[None, None]` for a matrix of any size",
        )
    try:
        spec = keras.KerasTensor(tuple(shape), _dtype(dtype))
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            "graph.placeholder",
            "dtype, shape",
            'a dtype such as "float32", and sizes or None, one for each axis',
            f"{dtype!r}, {shape!r}",
            f"placeholder(dtype, shape): {error}",
        ) from None
    (made,) = _Fed().give((), [spec], name)
    return made  # type: ignore[no-any-return]


def _dtype(dtype: Any) -> str:
    return str(keras.backend.standardize_dtype(getattr(dtype, "as_numpy_dtype", dtype)))


class _Constant(Made):
    kind = "constant"

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    def call(self) -> Any:
        return ops.convert_to_tensor(self._value)


def constant(value: Any, dtype: Any = None, name: str | None = None) -> Tensor:
    """A tensor with a fixed value.

    Example:
        >>> from trainstep import graph
        >>> graph.Session().run(graph.constant([1.0, 2.0]) * 3).tolist()
        [3.0, 6.0]
    """
    array = as_array(value, None if dtype is None else _dtype(dtype))
    (made,) = _Constant(array).give((), [array], name)
    return made  # type: ignore[no-any-return]


def as_array(value: Any, dtype: str | None = None) -> Any:
    """A value as an array. Without a dtype, Python's and NumPy's numbers get Keras's default."""
    if dtype is None and not isinstance(value, np.ndarray):
        plain = not hasattr(value, "dtype")
        value = np.asarray(value) if plain else value
        dtype = "int32" if plain and value.dtype.kind == "i" else None
    if dtype is None and getattr(value, "dtype", None) == np.float64:
        dtype = keras.config.floatx()
    return ops.convert_to_numpy(ops.convert_to_tensor(value, dtype))


class _Random(Made):
    kind = "random"

    def __init__(self, draw: Callable[..., Any], seed: Any) -> None:
        super().__init__()
        self._draw = draw
        own = isinstance(seed, keras.random.SeedGenerator)
        self._seed = seed if own else keras.random.SeedGenerator(seed)

    def call(self) -> Any:
        return self._draw(seed=self._seed)


def random_normal(  # noqa: PLR0917  # as in TensorFlow 1
    shape: Sequence[int],
    mean: float = 0.0,
    stddev: float = 1.0,
    dtype: Any = None,
    seed: Any = None,
    name: str | None = None,
) -> Tensor:
    """Normal random numbers, drawn anew at every run.

    Example:
        >>> from trainstep import graph
        >>> noise, session = graph.random_normal([3], seed=1), graph.Session()
        >>> bool((session.run(noise) == session.run(noise)).all())
        False
    """
    dtype = keras.config.floatx() if dtype is None else _dtype(dtype)

    def draw(seed: Any) -> Any:
        return keras.random.normal(tuple(shape), mean, stddev, dtype, seed)

    (made,) = _Random(draw, seed).give((), [keras.KerasTensor(tuple(shape), dtype)], name)
    return made  # type: ignore[no-any-return]


def random_uniform(  # noqa: PLR0917  # as in TensorFlow 1
    shape: Sequence[int],
    minval: float = 0.0,
    maxval: float = 1.0,
    dtype: Any = None,
    seed: Any = None,
    name: str | None = None,
) -> Tensor:
    """Uniform random numbers, drawn anew at every run.

    Example:
        >>> from trainstep import graph
        >>> value = graph.Session().run(graph.random_uniform([3], 2.0, 4.0))
        >>> bool((value >= 2).all() and (value < 4).all())
        True
    """
    dtype = keras.config.floatx() if dtype is None else _dtype(dtype)

    def draw(seed: Any) -> Any:
        return keras.random.uniform(tuple(shape), minval, maxval, dtype, seed)

    (made,) = _Random(draw, seed).give((), [keras.KerasTensor(tuple(shape), dtype)], name)
    return made  # type: ignore[no-any-return]


class Identity(Made):
    """A tensor again, under a name; in a block, its value when that is reached."""

    kind = "identity"

    def __init__(self) -> None:
        super().__init__()
        graph = get_default_graph()
        self.block = graph.blocks.current
        self.index = graph.next_index()

    def call(self, x: Any) -> Any:
        return x


def identity(tensor: Any, name: str | None = None) -> Tensor:
    """The same tensor under a name, by which it can be fetched.

    Inside `control_dependencies`, a variable is read after those operations.

    Example:
        >>> from trainstep import graph
        >>> total = graph.identity(graph.constant(1.0) + 2.0, name="total")
        >>> float(graph.Session().run("total"))
        3.0
    """
    from trainstep.graph._variables import as_tensor

    tensor = as_tensor(tensor, "graph.identity", "tensor")
    (made,) = Identity().give((tensor,), [tensor], name)
    return made  # type: ignore[no-any-return]


class Call(Made):
    """A Python function of tensors."""

    kind = "call"

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn
        self.kind = getattr(fn, "__name__", type(fn).__name__).strip("<>")

    def call(self, *args: Any) -> Any:
        return self.fn(*args)

    def uses(self) -> list[Any]:
        return [self.fn]


def call(fn: Callable[..., Any], *args: Any, name: str | None = None) -> Any:
    """A Python function of tensors as a part of the graph.

    It is for what has no symbolic form in Keras: loss objects, `keras.random`, a function of
    one's own. The function is traced into the step, and may read and write Keras variables.

    Args:
        fn: A function of tensors that returns a tensor or a structure of them.
        *args: Its arguments: symbolic tensors, variables, and anything else as it is.
        name: The name of its result, if it is one tensor.

    Returns:
        What the function returns, with symbolic tensors in it.

    Example:
        >>> import keras
        >>> from trainstep import graph
        >>> x = graph.placeholder("float32", [None, 2])
        >>> loss = graph.call(keras.losses.MeanSquaredError(), x, 1.0 + x)
        >>> float(graph.Session().run(loss, {x: [[1.0, 2.0]]}))
        1.0
    """
    operation = Call(fn)
    if not any(isinstance(each, keras.KerasTensor) for each in keras.tree.flatten(args)):
        raise ArgumentError(
            "graph.call",
            "args",
            "a tensor of the graph among the arguments",
            "none",
            "wrap a value in `graph.constant`, or a variable in `graph.read`",
        )
    spec = operation.compute_output_spec(*args)
    flat = keras.tree.flatten(spec)
    made = operation.give(args, flat, name)
    return keras.tree.pack_sequence_as(spec, made)


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
