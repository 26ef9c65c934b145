"""`cond`: one of two functions, which may take tensors from around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
from keras import ops, tree

from trainstep._common.errors import ArgumentError
from trainstep._state import scopes
from trainstep.graph._cond_operations import Choice
from trainstep.graph._function_bodies import Body, Holding, distinct, written
from trainstep.graph._tensors import describe, sizes
from trainstep.graph._variables import as_tensor

_FUNCTION = "graph.cond"


class _Branches(Holding):
    kind = "cond"

    def __init__(self, true: Body, false: Body, inputs: Sequence[Any]) -> None:
        super().__init__([true, false])
        self._keys = [id(tensor) for tensor in inputs]

    def call(self, pred: Any, inputs: Any) -> Any:
        known = dict(zip(self._keys, inputs, strict=True))
        depth = len(_side_by_side())
        shapes: list[str] = []

        def branch(body: Body) -> list[Any]:
            found = _run(body, known, depth)
            shapes.append(", ".join(str(tuple(value.shape)) for value in found))
            return found

        try:
            return ops.cond(pred, *(partial(branch, body) for body in self.bodies))
        except ArgumentError:
            raise
        except (TypeError, ValueError) as error:
            if len(set(shapes[-2:])) < 2:
                raise
            raise ArgumentError(
                _FUNCTION,
                "true_fn, false_fn",
                "the same shapes of both at a run, also where axes are declared as None",
                " and ".join(shapes[-2:]),
                "pad or cut them to the same sizes",
            ) from error


def _side_by_side() -> Sequence[tuple[Any, int]]:
    """The branches around this one that are computed whether they are taken or not."""
    recorder = scopes.active()
    return () if recorder is None else recorder.branches


def _run(body: Body, values: dict[int, Any], depth: int) -> list[Any]:
    around = _side_by_side()
    if len(around) == depth:
        return body.run(values)
    # Both branches are computed. Gradients of the one that is not taken are zeros times its
    # slopes, which is no number if a slope is infinite: they are stopped where it begins.
    taken = ops.equal(*around[-1])

    def stopped(value: Any) -> Any:
        is_float = "float" in keras.backend.standardize_dtype(value.dtype)
        return ops.where(taken, value, ops.stop_gradient(value)) if is_float else value

    scope = scopes.current_scope()
    with scopes.Branch(lambda variable, value: stopped(value), scope.current_graph) as inside:
        found = body.run({key: stopped(value) for key, value in values.items()})
    inside.give_back(inside.new_values())
    return found


def cond(
    pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any], name: str | None = None
) -> Any:
    """What one of two functions returns, as a boolean tensor tells at every run.

    The functions take no arguments, and may use any tensors and variables of the graph. What they
    write is computed only if it is their turn; on torch, and for a branch that updates variables
    or draws random numbers, both are computed, and one is taken with what it updates.

    They may return operations that they make, instead of tensors: the result is an operation.

    Args:
        pred: A boolean tensor without axes.
        true_fn: A function that returns a tensor, a structure of them, or operations.
        false_fn: Another, for the same structure, shapes and dtypes; `graph.no_op` does nothing.
        name: The name of the result, if it is one tensor or an operation.

    Returns:
        What both functions return, with symbolic tensors in it; or an `Operation`.

    Example:
        >>> from trainstep import graph
        >>> x = graph.placeholder("float32", [])
        >>> root = graph.cond(x > 0.0, lambda: x**0.5, lambda: 0.0)
        >>> [float(graph.Session().run(root, {x: value})) for value in (9.0, -9.0)]
        [3.0, 0.0]
        >>> best = graph.Variable(0.0)
        >>> keep = graph.cond(x > best, lambda: best.assign(x), graph.no_op)
        >>> for value in (3.0, 7.0, 5.0):
        ...     graph.Session().run(keep, {x: value})
        >>> float(graph.Session().run(best))
        7.0
    """
    pred = predicate(pred, _FUNCTION, "pred")
    true = written(true_fn, (), _FUNCTION, "true_fn", updates=True)
    false = written(false_fn, (), _FUNCTION, "false_fn", updates=True)
    inputs = distinct([*true.inputs, *false.inputs])
    if (true.operations is None) != (false.operations is None):
        raise _differ(true, false)
    if true.operations or false.operations:
        return Choice(name, pred, [true, false], inputs)
    specs = _merged(true, false)
    made = _Branches(true, false, inputs).give((pred, inputs), specs, name)
    return tree.pack_sequence_as(true.returned, made)


def predicate(value: Any, function: str, argument: str, told: str = "") -> Any:
    """A boolean tensor without axes.

    Args:
        value: What should be one.
        function: Of which function it is an argument, for messages.
        argument: And which one.
        told: What the argument does with it, if it is a function.
    """
    tensor = as_tensor(value, function, argument)
    if tensor.dtype != "bool" or len(tensor.shape):
        raise ArgumentError(
            function,
            argument,
            f"{told}a boolean tensor without axes",
            describe(tensor),
            "compare: `x > 0.0`; reduce several with `keras.ops.any` or `keras.ops.all`",
        )
    return tensor


def _merged(true: Body, false: Body) -> list[Any]:
    """The specs of what both branches return."""
    try:
        tree.assert_same_structure(true.returned, false.returned)
    except (TypeError, ValueError):
        raise _differ(true, false) from None
    if not true.outputs:
        raise ArgumentError(
            _FUNCTION,
            "true_fn",
            "a function that returns a tensor, a structure of them, or an operation",
            f"one that returns {true.returned!r}",
            "return a tensor",
        )
    specs = []
    for ours, theirs in zip(true.outputs, false.outputs, strict=True):
        shape = merged_shape(ours.shape, theirs.shape)
        if shape is None or ours.dtype != theirs.dtype:
            raise _differ(true, false)
        specs.append(keras.KerasTensor(shape, ours.dtype))
    return specs


def merged_shape(ours: Any, theirs: Any) -> tuple[int | None, ...] | None:
    """The shape of two tensors of which one is taken; None if they do not fit."""
    if len(ours) != len(theirs):
        return None
    pairs = list(zip(ours, theirs, strict=True))
    if any(None not in pair and pair[0] != pair[1] for pair in pairs):
        return None
    return tuple(None if None in pair else pair[0] for pair in pairs)


def shown(returned: Any) -> str:
    """A structure of tensors or operations, for messages."""
    found = tree.map_structure(
        lambda each: sizes(each) if isinstance(each, keras.KerasTensor) else str(each), returned
    )
    return str(found).replace("'", "")


def _differ(true: Body, false: Body) -> ArgumentError:
    return ArgumentError(
        _FUNCTION,
        "false_fn",
        f"what `true_fn` returns: {shown(true.returned)}",
        shown(false.returned),
        "let both return the same structure, shapes and dtypes; cast with `keras.ops.cast`",
    )
