"""`cond`: runs one of two functions, which may capture tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
from keras import ops, tree

from trainstep._common.errors import ArgumentError
from trainstep._state import scopes
from trainstep.graph._cond_operations import ConditionalOperation
from trainstep.graph._function_bodies import Body, OperationWithBodies, build_body, distinct
from trainstep.graph._tensors import describe, spec_text
from trainstep.graph._variables import as_tensor

_FUNCTION = "graph.cond"


class _CondNode(OperationWithBodies):
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
                "the same shapes from both in a run, also for axes that are None",
                " and ".join(shapes[-2:]),
                "pad or slice them to the same sizes",
            ) from error


def _side_by_side() -> Sequence[tuple[Any, int]]:
    """The enclosing branches that are computed whether or not they are selected."""
    recorder = scopes.active()
    return () if recorder is None else recorder.branches


def _run(body: Body, values: dict[int, Any], depth: int) -> list[Any]:
    around = _side_by_side()
    if len(around) == depth:
        return body.run(values)
    # Both branches are computed. The gradient of the unselected one is zero times its slopes, which
    # is NaN if a slope is infinite: `stop_gradient` on its inputs prevents that.
    is_selected = ops.equal(*around[-1])

    def stopped(value: Any) -> Any:
        is_float = "float" in keras.backend.standardize_dtype(value.dtype)
        return ops.where(is_selected, value, ops.stop_gradient(value)) if is_float else value

    scope = scopes.current_scope()
    with scopes.Branch(lambda variable, value: stopped(value), scope.current_graph) as inside:
        found = body.run({key: stopped(value) for key, value in values.items()})
    inside.give_back(inside.new_values())
    return found


def cond(
    pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any], name: str | None = None
) -> Any:
    """Selects the result of one of two functions by a boolean tensor, at every run.

    The functions have no parameters, and may use any tensors and variables of the graph. A run
    computes only the selected branch. On torch, and if a branch updates variables or draws random
    numbers, a run computes both branches and keeps the result and updates of the selected one.

    The functions may return operations that they make, instead of tensors: the result is then an
    operation.

    Args:
        pred: A boolean tensor without axes.
        true_fn: A function that returns a tensor, a structure of tensors, or operations.
        false_fn: A function that returns the same structure, shapes and dtypes; `graph.no_op`
            updates nothing.
        name: The name of the result, if it is one tensor or an operation.

    Returns:
        The common structure of both results, as symbolic tensors; or an `Operation`.

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
    true = build_body(true_fn, (), _FUNCTION, "true_fn", updates=True)
    false = build_body(false_fn, (), _FUNCTION, "false_fn", updates=True)
    inputs = distinct([*true.inputs, *false.inputs])
    if (true.operations is None) != (false.operations is None):
        raise _branches_differ(true, false)
    if true.operations or false.operations:
        return ConditionalOperation(name, pred, [true, false], inputs)
    specs = _merged_specs(true, false)
    made = _CondNode(true, false, inputs).make_outputs((pred, inputs), specs, name)
    return tree.pack_sequence_as(true.returned, made)


def predicate(value: Any, function: str, argument: str, prefix: str = "") -> Any:
    """Converts a value to a boolean tensor without axes, or rejects it.

    Args:
        value: The value.
        function: The public function that received the value, for messages.
        argument: The name of the argument.
        prefix: The start of the expectation, for an argument that is a function.
    """
    tensor = as_tensor(value, function, argument)
    if tensor.dtype != "bool" or len(tensor.shape):
        raise ArgumentError(
            function,
            argument,
            f"{prefix}a boolean tensor without axes",
            describe(tensor),
            "use a comparison: `x > 0.0`; reduce an array with `keras.ops.any` or `keras.ops.all`",
        )
    return tensor


def _merged_specs(true: Body, false: Body) -> list[Any]:
    """The common specs of the outputs of both branches."""
    try:
        tree.assert_same_structure(true.returned, false.returned)
    except (TypeError, ValueError):
        raise _branches_differ(true, false) from None
    if not true.outputs:
        raise ArgumentError(
            _FUNCTION,
            "true_fn",
            "a function that returns a tensor, a structure of tensors, or an operation",
            f"a function that returns {true.returned!r}",
            "return a tensor",
        )
    specs = []
    for ours, theirs in zip(true.outputs, false.outputs, strict=True):
        shape = merged_shape(ours.shape, theirs.shape)
        if shape is None or ours.dtype != theirs.dtype:
            raise _branches_differ(true, false)
        specs.append(keras.KerasTensor(shape, ours.dtype))
    return specs


def merged_shape(ours: Any, theirs: Any) -> tuple[int | None, ...] | None:
    """Returns the common shape of two tensors; None if their shapes conflict."""
    if len(ours) != len(theirs):
        return None
    pairs = list(zip(ours, theirs, strict=True))
    if any(None not in pair and pair[0] != pair[1] for pair in pairs):
        return None
    return tuple(None if None in pair else pair[0] for pair in pairs)


def structure_text(returned: Any) -> str:
    """Describes a structure of tensors or operations in an error message."""
    found = tree.map_structure(
        lambda each: spec_text(each) if isinstance(each, keras.KerasTensor) else str(each), returned
    )
    return str(found).replace("'", "")


def _branches_differ(true: Body, false: Body) -> ArgumentError:
    return ArgumentError(
        _FUNCTION,
        "false_fn",
        f"the same as `true_fn` returns: {structure_text(true.returned)}",
        structure_text(false.returned),
        "return the same structure, shapes and dtypes from both; cast with `keras.ops.cast`",
    )
