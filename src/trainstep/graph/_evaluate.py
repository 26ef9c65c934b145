"""Computes tensors of a graph inside a step: each node once, in one forward pass.

Gradients are computed first. The differentiated function computes the losses and every other tensor
that does not depend on a gradient, so losses, gradients and outputs share one forward pass.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import keras
from keras import ops

from trainstep._common.errors import ArgumentError
from trainstep._common.keras_private import to_snake_case
from trainstep._engines import current
from trainstep._function.inside.gradients import differentiated
from trainstep._state.scopes import discarded
from trainstep.graph._tensors import NodeOperation, label, node_of
from trainstep.graph._traverse import downstream, needed, variables_in, with_inner_nodes

Values = dict[int, Any]  # by the id of a tensor


class Gradients(NodeOperation):
    """The gradients of a sum of tensors, with respect to variables or to tensors.

    Args:
        ys: The tensors of the sum.
        variables: The Keras variables; empty if there are `xs`.
        xs: The tensors; empty if there are `variables`.
    """

    kind = "gradients"
    is_unaliased = True

    def __init__(self, ys: Sequence[Any], variables: Sequence[Any], xs: Sequence[Any]) -> None:
        super().__init__()
        self.ys, self.variables, self.xs = list(ys), list(variables), list(xs)

    def call(self, *args: Any) -> Any:  # pragma: no cover: `Computation` computes it
        raise RuntimeError("gradients are computed together with their losses")


class Computation:
    """Computes tensors in one run.

    Args:
        fed: The ids of fed tensors.
        shifts: Zeros to add to tensors, by id: the derivative by a shift is that by its tensor.
        early: The tensors, by id, that were computed before the updates.
    """

    def __init__(
        self,
        fed: Collection[int] = (),
        shifts: Values | None = None,
        early: Mapping[int, Any] = MappingProxyType({}),
    ) -> None:
        self.fed, self._shifts, self._early = fed, shifts or {}, early
        self._path: Collection[Any] = ()  # the nodes that are being differentiated

    def after(self, tensors: Sequence[Any]) -> Computation:
        """Returns the computation after an update; `tensors` were computed before it."""
        return Computation(self.fed, self._shifts, {id(tensor): tensor for tensor in tensors})

    def add(self, tensors: Iterable[Any], values: Values) -> None:
        """Computes tensors, and adds their values and those of their inputs to `values`."""
        nodes = needed(list(tensors), values)
        if any(isinstance(node.operation, Gradients) for node in nodes):
            self._differentiate(nodes, values)
        for node in nodes:
            if any(id(output) not in values for output in node.outputs):
                self._run(node, values)

    def _run(self, node: Any, values: Values) -> None:
        args, kwargs = node.arguments.fill_in(values)
        try:
            with _differentiation() if node in self._path else contextlib.nullcontext():
                outputs = keras.tree.flatten(node.operation(*args, **kwargs))
        except ArgumentError:
            raise
        except (TypeError, ValueError) as error:
            if _has_function_argument(node):
                raise _closure_error(node) from error
            raise
        if any(isinstance(value, keras.KerasTensor) for value in outputs):
            raise _closure_error(node)
        for tensor, value in zip(node.outputs, outputs, strict=True):
            shift = self._shifts.get(id(tensor))
            values[id(tensor)] = value if shift is None else value + shift

    def _differentiate(self, nodes: Sequence[Any], values: Values) -> None:
        """Computes the outermost gradients among nodes; inner ones are part of their losses."""
        every = [node for node in nodes if isinstance(node.operation, Gradients)]
        inner = {each for node in every for each in needed(node.operation.ys, values)}
        outer = [node for node in every if node not in inner]
        # Nodes that depend on no gradient are computed in the same forward pass.
        after = downstream(nodes, set(outer))
        beside = [tensor for node in nodes if node not in after for tensor in node.outputs]
        found = self._gradients(outer, dict(values), beside)
        values.update({key: value for key, value in found.items() if key not in values})

    def _gradients(self, nodes: Sequence[Any], known: Values, beside: Sequence[Any]) -> Values:
        """The outputs of gradient nodes, and all other values that were computed for them."""
        losses = list({_loss_key(n.operation): n.operation.ys for n in nodes}.values())
        variables = {id(v): v for node in nodes for v in node.operation.variables}
        xs = {id(x): x for node in nodes for x in node.operation.xs}
        behind = [t for node in nodes for t in fed_on_path(node.operation, self.fed)]
        shifted = [x for x in xs.values() if id(x) not in known]
        order = [*(key for key in xs if key in known), *map(id, shifted)]
        at = [known[key] for key in xs if key in known] + self._zeros(shifted, known)
        known = self._without_path(known, losses, {*variables, *xs})
        keys: list[int] = []

        def totals(tensors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            given = dict(zip(order, tensors, strict=True))
            shifts = {id(x): given.pop(id(x)) for x in shifted}
            here = {**known, **given}
            inside = Computation(self.fed, {**self._shifts, **shifts}, self._early)
            inside._path = set(needed(y for ys in losses for y in ys))
            for tensor in behind:
                inside._extend_path_behind(tensor, here)
            inside.add([*(y for ys in losses for y in ys), *beside], here)
            keys[:] = [key for key in here if key not in known]
            sums = [[_summed(here[id(y)]) for y in ys] for ys in losses]
            return [sum(one[1:], one[0]) for one in sums], [here[key] for key in keys]

        try:
            aux, by_variable, by_x = differentiated(totals, list(variables.values()), at)
        except ValueError as error:
            loops = _unbounded_loops(nodes) if "while_loop" in str(error) else []
            if not loops:
                raise
            raise _loop_gradient_error(loops[0]) from error
        found = dict(zip(keys, aux, strict=True))
        for ys, ours, theirs in zip(losses, by_variable, by_x, strict=True):
            by = dict(zip(variables, ours, strict=True)) | dict(zip(order, theirs, strict=True))
            for operation, outputs in ((node.operation, node.outputs) for node in nodes):
                if _loss_key(operation) == tuple(map(id, ys)):
                    asked = operation.xs or operation.variables
                    found |= {id(t): by[id(x)] for t, x in zip(outputs, asked, strict=True)}
        return found

    def _without_path(self, known: Values, losses: Any, wanted: set[int]) -> Values:
        """The known values, without those on the path of differentiation."""
        nodes = needed((y for ys in losses for y in ys), self.fed)
        roots = {n for n in nodes if wanted & {id(x) for x in (*n.outputs, *variables_in(n))}}
        roots |= {n for n in nodes if getattr(n.operation, "is_opaque", False)}
        path = {id(t) for node in downstream(nodes, roots) for t in node.outputs}
        early = [tensor for key, tensor in self._early.items() if key in path - set(self.fed)]
        early = [tensor for tensor in early if node_of(tensor).input_tensors]
        if early:
            raise ArgumentError(
                "graph.gradients",
                "ys",
                "a loss that is built completely inside `control_dependencies`, or outside",
                f"a loss that depends on `{label(early[0])}`, computed before the updates",
                "build the whole loss inside the block, or the whole loss outside",
            )
        return {key: value for key, value in known.items() if key in self.fed or key not in path}

    def _zeros(self, tensors: Sequence[Any], known: Values) -> list[Any]:
        """Zeros in the shapes of tensors, which are computed only for their shapes."""
        if not tensors:
            return []
        values = dict(known)
        with discarded():
            self.add(tensors, values)
        return [ops.zeros_like(values[id(tensor)]) for tensor in tensors]

    def _extend_path_behind(self, tensor: Any, values: Values) -> None:
        """Extends the path of differentiation behind a fed tensor; its value stays the same."""
        node, given = node_of(tensor), values[id(tensor)]
        self.add(node.input_tensors, values)
        made = {key: value for key, value in values.items() if key != id(tensor)}
        self._run(node, made)
        own = made[id(tensor)]
        values[id(tensor)] = given + (own - ops.stop_gradient(own))  # adds zero, with a gradient


class _Local(threading.local):
    def __init__(self) -> None:
        self.depth = 0


_local = _Local()


@contextlib.contextmanager
def _differentiation() -> Iterator[None]:
    _local.depth += 1
    try:
        yield
    finally:
        _local.depth -= 1


def is_differentiating() -> bool:
    """Whether this thread is computing a node on the path of differentiation."""
    return _local.depth > 0


def _has_function_argument(node: Any) -> bool:
    if isinstance(node.operation, (NodeOperation, keras.Layer)):
        return False
    own = [value for key, value in vars(node.operation).items() if not key.startswith("_")]
    given = keras.tree.flatten([node.arguments.args, node.arguments.kwargs, own])
    return any(callable(each) and not isinstance(each, type) for each in given)


def _closure_error(node: Any) -> ArgumentError:
    name = to_snake_case(type(node.operation).__name__)
    cure = "pass them as arguments: `graph.call(function, *tensors)`"
    if name in ("cond", "while_loop"):
        cure = (
            f"use `graph.{name}`, whose functions may capture tensors; for a Keras function that "
            "contains it, such as `keras.losses.hinge`, use `graph.call(fn, *tensors)`"
        )
    elif name != "call":
        cure = (
            f"call `keras.ops.{name}` in a function of these tensors, and add it with "
            "`graph.call(function, *tensors)`"
        )
    return ArgumentError(
        "graph.call" if name == "call" else f"keras.ops.{name}",
        "fn" if name == "call" else "functions",
        "functions that get all tensors as arguments",
        "functions that, probably, capture tensors of the graph",
        cure,
    )


def _unbounded_loops(nodes: Sequence[Any]) -> list[Any]:
    """The loops without a fixed maximum of iterations, on the path of gradient nodes."""
    under = needed(y for node in nodes for y in node.operation.ys)
    return [n for n in with_inner_nodes(under) if getattr(n.operation, "is_unbounded", False)]


def _loop_gradient_error(loop: Any) -> ArgumentError:
    return ArgumentError(
        "graph.gradients",
        "ys",
        f"a tensor that {current().name} can differentiate",
        f"the loop `{label(loop.outputs[0])}`, which has no fixed maximum of iterations",
        "pass `maximum_iterations=` as a number; or use `keras.ops.scan` or "
        "`keras.ops.fori_loop` in a function for `graph.call`",
    )


def _summed(value: Any) -> Any:
    return ops.sum(value) if len(value.shape) else value


def _loss_key(operation: Gradients) -> tuple[int, ...]:
    return tuple(map(id, operation.ys))


def evaluate(tensors: Sequence[Any]) -> list[Any]:
    """Computes tensors that need no feeds."""
    values: Values = {}
    Computation().add(tensors, values)
    return [values[id(tensor)] for tensor in tensors]


def fed_on_path(operation: Gradients, fed: Collection[int]) -> list[Any]:
    """Returns the fed tensors on the path between the losses and the variables or `xs`.

    A feed replaces a value, not its dependencies: gradients continue behind it.
    """
    wanted = {*map(id, operation.variables), *map(id, operation.xs)}
    found = []
    for node in needed(operation.ys) if fed else ():
        for tensor in node.outputs:
            if id(tensor) in fed and (node.input_tensors or variables_in(node)):
                behind = needed(node.input_tensors)
                variables = (v for n in (*behind, node) for v in variables_in(n))
                made = (t for n in behind for t in n.outputs)
                if wanted & {id(each) for each in (*made, *node.input_tensors, *variables)}:
                    found.append(tensor)
    return found


def is_new(node: Any, known: Collection[Any]) -> bool:
    """Whether a node is not in `known`; a gradient node is new if one of its losses is."""
    if isinstance(node.operation, Gradients):
        return any(is_new(made, known) for y in node.operation.ys if (made := node_of(y)))
    return node not in known
