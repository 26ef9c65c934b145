"""Tensors that are made of others by us: `identity`, `shape`, and a Python function as a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from trainstep._common.errors import ArgumentError
from trainstep.graph._tensors import Made, Tensor
from trainstep.graph._variables import as_tensor


class Identity(Made):
    """A tensor again, under a name."""

    kind = "identity"

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
    tensor = as_tensor(tensor, "graph.identity", "tensor")
    (made,) = Identity().give((tensor,), [tensor], name)
    return made  # type: ignore[no-any-return]


class _Shape(Made):
    kind = "shape"
    is_fresh = True

    def call(self, x: Any) -> Any:
        found = [ops.convert_to_tensor(size, "int32") for size in ops.shape(x)]
        return ops.stack(found) if found else ops.zeros((0,), "int32")


def shape(tensor: Any, name: str | None = None) -> Tensor:
    """The sizes of a tensor at a run, also of axes that were declared as None.

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
    (made,) = _Shape().give((tensor,), [keras.KerasTensor((len(tensor.shape),), "int32")], name)
    return made  # type: ignore[no-any-return]


class Call(Made):
    """A Python function of tensors."""

    kind = "call"
    is_opaque = True

    def __init__(self, fn: Callable[..., Any], *, is_fresh: bool) -> None:
        super().__init__()
        self.fn, self.is_fresh = fn, is_fresh
        self.kind = getattr(fn, "__name__", type(fn).__name__).strip("<>_")

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
    return called(fn, args, name)


def called(
    fn: Callable[..., Any], args: Sequence[Any], name: str | None, *, is_fresh: bool = False
) -> Any:
    """The same; `is_fresh` tells that results share no memory with what the function takes."""
    operation = Call(fn, is_fresh=is_fresh)
    if not any(isinstance(each, keras.KerasTensor) for each in keras.tree.flatten(list(args))):
        raise ArgumentError(
            "graph.call",
            "args",
            "a tensor of the graph among the arguments",
            "none",
            "wrap a value in `graph.constant`, or a variable in `graph.read`",
        )
    try:
        spec = operation.compute_output_spec(*args)
    except Exception as error:
        raise ArgumentError(
            "graph.call",
            "fn",
            "a function that can be run on tensors without values",
            f"{operation.kind}, which raised {type(error).__name__}: {_first_line(error)}",
            "pass all tensors as arguments, or write `graph.cond` or `graph.while_loop`, whose "
            "functions may take them from around them; choose with `keras.ops.where` or "
            "`keras.ops.cond`, not with `if`; `graph.shape` has sizes that are declared as None",
        ) from error
    flat = keras.tree.flatten(spec)
    made = operation.give(args, flat, name)
    return keras.tree.pack_sequence_as(spec, made)


def _first_line(error: Exception) -> str:
    """What went wrong, without what Keras says around it."""
    _, _, inner = str(error).rpartition("Error encountered:")
    lines = [line for line in inner.splitlines() if line.strip()]
    return lines[0].strip() if lines else ""
