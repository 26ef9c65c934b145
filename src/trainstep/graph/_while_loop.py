"""`while_loop`: a loop in the step, whose functions may take tensors from around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import keras
from keras import ops, tree

from trainstep import _engines
from trainstep._common.errors import ArgumentError, StateError
from trainstep.graph._cond import merged_shape, predicate, shown
from trainstep.graph._evaluate import is_differentiating
from trainstep.graph._function_bodies import Body, Holding, distinct, written
from trainstep.graph._graph import get_default_graph
from trainstep.graph._tensors import Made, describe, node_of
from trainstep.graph._traverse import with_inner
from trainstep.graph._variables import as_tensor

_FUNCTION = "graph.while_loop"


class _Turn(Made):
    """The values of the loop's tensors at one turn."""

    kind = "turn"

    def call(self) -> Any:  # pragma: no cover: a loop gives them
        raise RuntimeError("a turn of a loop has no value of its own")


class _Loop(Holding):
    kind = "while_loop"

    def __init__(
        self, goes_on: Body, body: Body, turn: Sequence[Any], inputs: Sequence[Any], limit: Any
    ) -> None:
        super().__init__([goes_on, body])
        self._turn, self._inputs = list(map(id, turn)), list(map(id, inputs))
        self.is_endless = not isinstance(limit, int)

    def call(self, first: Any, inputs: Any, limit: Any) -> Any:
        known = dict(zip(self._inputs, inputs, strict=True))
        goes_on, body = self.bodies

        def has_next(*turn: Any) -> Any:
            return goes_on.run({**known, **dict(zip(self._turn, turn, strict=True))})[0]

        def after(*turn: Any) -> tuple[Any, ...]:
            return tuple(body.run({**known, **dict(zip(self._turn, turn, strict=True))}))

        first = tuple(ops.convert_to_tensor(value) for value in first)
        try:
            if not self.is_endless and _goes_back():
                return _counted(has_next, after, first, limit)
            return ops.while_loop(has_next, after, first, maximum_iterations=limit)
        except StateError as error:
            raise ArgumentError(
                _FUNCTION,
                "body",
                "a function that updates nothing",
                f"one that sets variable `{error.variable}`",
                "call layers in a loop with `training=False`; draw random numbers before it",
            ) from error


def _goes_back() -> bool:
    """Whether gradients are taken of a loop that the engine has none of."""
    return is_differentiating() and not _engines.current().loops_have_gradients


def _counted(
    has_next: Callable[..., Any], after: Callable[..., Any], first: tuple[Any, ...], limit: int
) -> Any:
    """The same loop as turns of a fixed number, of which the last ones may do nothing."""

    def turn(values: tuple[Any, ...], _: Any) -> tuple[Any, None]:
        return ops.cond(has_next(*values), lambda: after(*values), lambda: values), None

    return ops.scan(turn, first, length=limit)[0]


def while_loop(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    loop_vars: Any,
    maximum_iterations: Any = None,
    name: str | None = None,
) -> Any:
    """Repeats a function of tensors as long as another one says so.

    Both functions may use any other tensors and variables of the graph. Shapes and dtypes stay
    the same from turn to turn.

    Gradients on JAX need `maximum_iterations` as a number, and then take that many turns.

    Args:
        cond: A function of the tensors that returns a boolean tensor without axes.
        body: A function of the tensors that returns the next ones, in the same structure.
        loop_vars: The first tensors: a list or a tuple, which are separate arguments of the
            functions, or one structure, which is their only argument.
        maximum_iterations: The most turns that are taken: a number, or an integer tensor.
        name: The name of the result, if it is one tensor.

    Returns:
        The last tensors, in the structure of `loop_vars`.

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
            _FUNCTION, "loop_vars", "at least one tensor", "none", "pass what changes in the loop"
        )
    limit = _limit(maximum_iterations)
    turn = _Turn().give((), first, None)
    graph = get_default_graph()
    graph.revision += 1
    graph.inside.update({node_of(tensor): _FUNCTION for tensor in turn})
    given = tree.pack_sequence_as(loop_vars, turn)
    args = given if isinstance(loop_vars, (list, tuple)) else (given,)
    goes_on = written(cond, args, _FUNCTION, "cond")
    predicate(goes_on.returned, _FUNCTION, "cond", "a function that returns ")
    after = written(body, args, _FUNCTION, "body")
    after = replace(after, returned=_like(loop_vars, after.returned))
    _check(turn, after, loop_vars)
    _check_random((goes_on, after))
    own = set(map(id, turn))
    inputs = distinct([t for t in (*goes_on.inputs, *after.inputs) if id(t) not in own])
    loop = _Loop(goes_on, after, turn, inputs, limit)
    return tree.pack_sequence_as(loop_vars, loop.give((first, inputs, limit), turn, name))


def _like(loop_vars: Any, returned: Any) -> Any:
    """What a body returned, as a list if the tensors are one, and so on."""
    if not isinstance(loop_vars, (list, tuple)):
        return returned
    if not isinstance(returned, (list, tuple)):
        returned = [returned]
    return type(loop_vars)(returned) if type(loop_vars) in (list, tuple) else returned


def _limit(limit: Any) -> Any:
    if limit is None or (isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0):
        return limit
    if isinstance(limit, keras.KerasTensor) and "int" in limit.dtype and not len(limit.shape):
        return limit
    raise ArgumentError(
        _FUNCTION,
        "maximum_iterations",
        "a number of turns, or an integer tensor without axes",
        describe(limit) if isinstance(limit, keras.KerasTensor) else repr(limit),
        "pass `maximum_iterations=100`, say",
    )


def _check(turn: Sequence[Any], after: Body, loop_vars: Any) -> None:
    """Refuses a body that returns other tensors than it takes."""
    given = tree.pack_sequence_as(loop_vars, list(turn))
    try:
        tree.assert_same_structure(given, after.returned)
        fit = all(
            merged_shape(ours.shape, theirs.shape) is not None and ours.dtype == theirs.dtype
            for ours, theirs in zip(turn, after.outputs, strict=True)
        )
    except (TypeError, ValueError):
        fit = False
    if not fit:
        raise ArgumentError(
            _FUNCTION,
            "body",
            f"a function that returns what `loop_vars` are: {shown(given)}",
            shown(after.returned),
            "keep the structure, shapes and dtypes from turn to turn; cast with `keras.ops.cast`",
        )


def _check_random(bodies: Sequence[Body]) -> None:
    nodes = with_inner(node for body in bodies for node in body.nodes)
    drawn = next((n for n in nodes if getattr(n.operation, "is_random", False)), None)
    if drawn is not None:
        raise ArgumentError(
            _FUNCTION,
            "body",
            "a function that draws no random numbers",
            f"{describe(drawn.outputs[0])} inside",
            "draw those of all turns before the loop, with one more axis, and take one at each "
            "turn: `keras.ops.take(noise, i, axis=0)`",
        )
