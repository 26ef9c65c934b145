"""Nodes of this module with inputs: `identity`, `shape`, and `call` of a Python function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from trainstep._common.errors import ArgumentError
from trainstep.graph._tensors import NodeOperation, Tensor
from trainstep.graph._variables import as_tensor


class Identity(NodeOperation):
    """Returns its input, under a name."""

    kind = "identity"

    def call(self, x: Any) -> Any:
        return x


def identity(tensor: Any, name: str | None = None) -> Tensor:
    """Gives a tensor a name, usable in fetches and feeds.

    Inside `control_dependencies`, a variable is read after the operations of the block.

    Example:
        >>> from trainstep import graph
        >>> total = graph.identity(graph.constant(1.0) + 2.0, name="total")
        >>> float(graph.Session().run("total"))
        3.0
    """
    tensor = as_tensor(tensor, "graph.identity", "tensor")
    (made,) = Identity().make_outputs((tensor,), [tensor], name)
    return made  # type: ignore[no-any-return]


class _Shape(NodeOperation):
    kind = "shape"
    is_unaliased = True

    def call(self, x: Any) -> Any:
        found = [ops.convert_to_tensor(size, "int32") for size in ops.shape(x)]
        return ops.stack(found) if found else ops.zeros((0,), "int32")


def shape(tensor: Any, name: str | None = None) -> Tensor:
    """Makes a tensor of the sizes that another tensor has in a run, also for axes of size None.

    Example:
        >>> import keras
        >>> from trainstep import graph
        >>> x = graph.placeholder("float32", [None, 3])
        >>> rows = keras.ops.cast(graph.shape(x)[0], "float32")
        >>> mean = keras.ops.sum(x, axis=0) / rows
        >>> graph.Session().run(mean, {x: [[1, 2, 3], [3, 2, 1]]}).tolist()
        [2.0, 2.0, 2.0]
    """
    tensor = as_tensor(tensor, "graph.shape", "tensor")
    (made,) = _Shape().make_outputs(
        (tensor,), [keras.KerasTensor((len(tensor.shape),), "int32")], name
    )
    return made  # type: ignore[no-any-return]


class Call(NodeOperation):
    """Calls a Python function of tensors."""

    kind = "call"
    is_opaque = True

    def __init__(self, fn: Callable[..., Any], *, is_unaliased: bool) -> None:
        super().__init__()
        self.fn, self.is_unaliased = fn, is_unaliased
        self.kind = getattr(fn, "__name__", type(fn).__name__).strip("<>_")

    def call(self, *args: Any) -> Any:
        return self.fn(*args)

    def uses(self) -> list[Any]:
        return [self.fn]


def call(fn: Callable[..., Any], *args: Any, name: str | None = None) -> Any:
    """Adds a call of a Python function to the graph.

    Use it for calls without a symbolic form in Keras: loss objects, `keras.random`, your own
    functions. The step traces the function, which may read and write Keras variables.

    Args:
        fn: A function of tensors that returns a tensor or a structure of tensors.
        *args: Its arguments: symbolic tensors, variables, and any other values.
        name: The name of its result, if the result is one tensor.

    Returns:
        The result of the function, as symbolic tensors.

    Example:
        >>> import keras
        >>> from trainstep import graph
        >>> x = graph.placeholder("float32", [None, 2])
        >>> loss = graph.call(keras.losses.MeanSquaredError(), x, 1.0 + x)
        >>> float(graph.Session().run(loss, {x: [[1.0, 2.0]]}))
        1.0
    """
    return call_node(fn, args, name)


def call_node(
    fn: Callable[..., Any], args: Sequence[Any], name: str | None, *, is_unaliased: bool = False
) -> Any:
    """Same as `call`; `is_unaliased`: the results share no memory with the arguments."""
    operation = Call(fn, is_unaliased=is_unaliased)
    if not any(isinstance(each, keras.KerasTensor) for each in keras.tree.flatten(list(args))):
        raise ArgumentError(
            "graph.call",
            "args",
            "a tensor of the graph among the arguments",
            "no tensor",
            "wrap a value in `graph.constant`, or a variable in `graph.read`",
        )
    try:
        spec = operation.compute_output_spec(*args)
    except Exception as error:
        raise ArgumentError(
            "graph.call",
            "fn",
            "a function that runs on symbolic tensors",
            f"{operation.kind}, which raised {type(error).__name__}: {_first_line(error)}",
            "pass all tensors as arguments, or use `graph.cond` or `graph.while_loop`, whose "
            "functions may capture tensors; branch with `keras.ops.where` or `keras.ops.cond`, not "
            "with `if`; `graph.shape` has the sizes of axes that are None",
        ) from error
    flat = keras.tree.flatten(spec)
    made = operation.make_outputs(args, flat, name)
    return keras.tree.pack_sequence_as(spec, made)


def _first_line(error: Exception) -> str:
    """The first line of the inner error, without the text that Keras adds."""
    _, _, inner = str(error).rpartition("Error encountered:")
    lines = [line for line in inner.splitlines() if line.strip()]
    return lines[0].strip() if lines else ""
