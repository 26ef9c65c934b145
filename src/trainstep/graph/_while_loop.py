"""`while_loop`: a loop inside the step, whose functions may capture tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import keras
from keras import ops, tree

from trainstep import _engines
from trainstep._common.errors import ArgumentError, StateError
from trainstep.graph._cond import merged_shape, predicate, structure_text
from trainstep.graph._evaluate import is_differentiating
from trainstep.graph._function_bodies import Body, OperationWithBodies, build_body, distinct
from trainstep.graph._graph import get_default_graph
from trainstep.graph._tensors import NodeOperation, describe, node_of
from trainstep.graph._traverse import with_inner_nodes
from trainstep.graph._variables import as_tensor

_FUNCTION = "graph.while_loop"


class _Iteration(NodeOperation):
    """The loop variables in one iteration."""

    kind = "loop_variable"

    def call(self) -> Any:  # pragma: no cover: the loop passes their values to its bodies
        raise RuntimeError("a loop variable has no value outside the loop")


class _Loop(OperationWithBodies):
    kind = "while_loop"

    def __init__(
        self,
        condition: Body,
        body: Body,
        current: Sequence[Any],
        inputs: Sequence[Any],
        limit: Any,
    ) -> None:
        super().__init__([condition, body])
        self._variable_ids, self._input_ids = list(map(id, current)), list(map(id, inputs))
        self.is_unbounded = not isinstance(limit, int)

    def call(self, first: Any, inputs: Any, limit: Any) -> Any:
        known = dict(zip(self._input_ids, inputs, strict=True))
        condition, body = self.bodies

        def keeps_going(*current: Any) -> Any:
            (found,) = condition.run(known | dict(zip(self._variable_ids, current, strict=True)))
            return found

        def after(*current: Any) -> tuple[Any, ...]:
            return tuple(body.run(known | dict(zip(self._variable_ids, current, strict=True))))

        first = tuple(ops.convert_to_tensor(value) for value in first)
        try:
            if not self.is_unbounded and _needs_bounded_scan():
                return _bounded_scan(keeps_going, after, first, limit)
            return ops.while_loop(keeps_going, after, first, maximum_iterations=limit)
        except StateError as error:
            raise ArgumentError(
                _FUNCTION,
                "body",
                "a function that updates no variable",
                f"a function that sets variable `{error.variable}`",
                "call layers in a loop with `training=False`; draw random numbers before the loop",
            ) from error


def _needs_bounded_scan() -> bool:
    """Whether the loop is being differentiated by an engine without gradients of loops."""
    return is_differentiating() and not _engines.current().loops_have_gradients


def _bounded_scan(
    keeps_going: Callable[..., Any], after: Callable[..., Any], first: tuple[Any, ...], limit: int
) -> Any:
    """The same loop as a scan of fixed length; after the end, iterations change nothing."""

    def iterate(values: tuple[Any, ...], _: Any) -> tuple[Any, None]:
        return ops.cond(keeps_going(*values), lambda: after(*values), lambda: values), None

    return ops.scan(iterate, first, length=limit)[0]


def while_loop(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    loop_vars: Any,
    maximum_iterations: Any = None,
    name: str | None = None,
) -> Any:
    """Repeats a function of the loop variables while another function returns True.

    Both functions may use any other tensors and variables of the graph. All iterations have the
    same shapes and dtypes.

    On JAX, gradients of a loop need `maximum_iterations` as a number, and run that many iterations.

    Args:
        cond: A function of the loop variables that returns a boolean tensor without axes.
        body: A function of the loop variables that returns the next ones, in the same structure.
        loop_vars: The initial loop variables: a list or a tuple for functions of several
            arguments, or another structure for functions of one argument.
        maximum_iterations: The maximum of iterations: a number, or an integer tensor.
        name: The name of the result, if it is one tensor.

    Returns:
        The final loop variables, in the structure of `loop_vars`.

    Example:
        >>> from trainstep import graph
        >>> x = graph.placeholder("float32", [])
        >>> turns, _ = graph.while_loop(
        ...     lambda n, power: power < x, lambda n, power: (n + 1, 2.0 * power), (0, 1.0)
        ... )
        >>> [int(graph.Session().run(turns, {x: value})) for value in (8.0, 1000.0)]
        [3, 10]
    """
    first = [as_tensor(each, _FUNCTION, "loop_vars") for each in tree.flatten(loop_vars)]
    if not first:
        raise ArgumentError(
            _FUNCTION, "loop_vars", "at least one tensor", "no tensor", "pass the loop variables"
        )
    limit = _checked_limit(maximum_iterations)
    current = _Iteration().make_outputs((), first, None)
    graph = get_default_graph()
    graph.body_owner.update({node_of(tensor): _FUNCTION for tensor in current})
    graph.revision += 1
    given = tree.pack_sequence_as(loop_vars, current)
    args = given if isinstance(loop_vars, (list, tuple)) else (given,)
    condition = build_body(cond, args, _FUNCTION, "cond")
    predicate(condition.returned, _FUNCTION, "cond", "a function that returns ")
    after = build_body(body, args, _FUNCTION, "body")
    after = replace(after, returned=_in_structure_of(loop_vars, after.returned))
    _check_body(current, after, loop_vars)
    _check_random((condition, after))
    own = set(map(id, current))
    inputs = distinct([t for t in (*condition.inputs, *after.inputs) if id(t) not in own])
    loop = _Loop(condition, after, current, inputs, limit)
    return tree.pack_sequence_as(
        loop_vars, loop.make_outputs((first, inputs, limit), current, name)
    )


def _in_structure_of(loop_vars: Any, returned: Any) -> Any:
    """The result of a body, as a list if `loop_vars` is a list, or as a tuple."""
    if not isinstance(loop_vars, (list, tuple)):
        return returned
    if not isinstance(returned, (list, tuple)):
        returned = [returned]
    return type(loop_vars)(returned) if type(loop_vars) in (list, tuple) else returned


def _checked_limit(limit: Any) -> Any:
    if limit is None or (isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0):
        return limit
    if isinstance(limit, keras.KerasTensor) and "int" in limit.dtype and not len(limit.shape):
        return limit
    raise ArgumentError(
        _FUNCTION,
        "maximum_iterations",
        "a number of iterations, or an integer tensor without axes",
        describe(limit) if isinstance(limit, keras.KerasTensor) else repr(limit),
        "pass a number, for example `maximum_iterations=100`",
    )


def _check_body(current: Sequence[Any], after: Body, loop_vars: Any) -> None:
    """Rejects a body whose result differs from its arguments in structure, shape or dtype."""
    given = tree.pack_sequence_as(loop_vars, list(current))
    try:
        tree.assert_same_structure(given, after.returned)
        fit = all(
            merged_shape(ours.shape, theirs.shape) is not None and ours.dtype == theirs.dtype
            for ours, theirs in zip(current, after.outputs, strict=True)
        )
    except (TypeError, ValueError):
        fit = False
    if not fit:
        raise ArgumentError(
            _FUNCTION,
            "body",
            f"a function that returns the same as `loop_vars`: {structure_text(given)}",
            structure_text(after.returned),
            "keep structure, shapes and dtypes in all iterations; cast with `keras.ops.cast`",
        )


def _check_random(bodies: Sequence[Body]) -> None:
    nodes = with_inner_nodes(node for body in bodies for node in body.nodes)
    drawn = next((n for n in nodes if getattr(n.operation, "is_random", False)), None)
    if drawn is not None:
        raise ArgumentError(
            _FUNCTION,
            "body",
            "a function that draws no random numbers",
            f"{describe(drawn.outputs[0])} inside",
            "draw the numbers of all iterations before the loop, with one more axis, and index "
            "them: `keras.ops.take(noise, i, axis=0)`",
        )
