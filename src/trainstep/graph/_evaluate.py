"""Computes tensors of a graph inside a step: each node once, forward passes shared.

Gradients come first. What they are gradients of is computed inside the differentiation, and with it
everything else that does not depend on them: losses, their gradients and the outputs beside them
are one forward pass.
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
from trainstep._engines import current
from trainstep._function.inside.gradients import differentiated
from trainstep._state.scopes import discarded
from trainstep.graph._tensors import Made, label, node_of
from trainstep.graph._traverse import downstream, needed, variables_in, with_inner

Values = dict[int, Any]  # by the id of a tensor


class Gradients(Made):
    """Gradients of the sum of some tensors.

    Args:
        ys: The tensors.
        variables: The Keras variables to differentiate by.
        xs: The tensors to differentiate by, instead of variables.
    """

    kind = "gradients"
    is_fresh = True

    def __init__(self, ys: Sequence[Any], variables: Sequence[Any], xs: Sequence[Any]) -> None:
        super().__init__()
        self.ys, self.variables, self.xs = list(ys), list(variables), list(xs)

    def call(self, *args: Any) -> Any:  # pragma: no cover: it is computed here, below
        raise RuntimeError("gradients are computed with what they are gradients of")


class Computation:
    """Computes tensors of one run.

    Args:
        fed: The ids of tensors that were fed.
        shifts: What is added to tensors, by their ids, to differentiate by them.
    """

    def __init__(
        self,
        fed: Collection[int] = (),
        shifts: Values | None = None,
        past: Mapping[int, Any] = MappingProxyType({}),
    ) -> None:
        self.fed, self._shifts, self._past = fed, shifts or {}, past
        self._path: Collection[Any] = ()  # the nodes that are differentiated

    def after(self, tensors: Sequence[Any]) -> Computation:
        """A computation after an update, when some tensors have been computed already."""
        return Computation(self.fed, self._shifts, {id(tensor): tensor for tensor in tensors})

    def add(self, tensors: Iterable[Any], values: Values) -> None:
        """Adds the values of tensors, and of what they need, to those that are known."""
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
            if _takes_functions(node):
                raise _closes_over(node) from error
            raise
        if any(isinstance(value, keras.KerasTensor) for value in outputs):
            raise _closes_over(node)
        for tensor, value in zip(node.outputs, outputs, strict=True):
            shift = self._shifts.get(id(tensor))
            values[id(tensor)] = value if shift is None else value + shift

    def _differentiate(self, nodes: Sequence[Any], values: Values) -> None:
        """Computes the gradients among nodes that are not part of what others are gradients of."""
        every = [node for node in nodes if isinstance(node.operation, Gradients)]
        inner = {each for node in every for each in needed(node.operation.ys, values)}
        outer = [node for node in every if node not in inner]
        # What depends on no gradient is part of the one forward pass.
        after = downstream(nodes, set(outer))
        beside = [tensor for node in nodes if node not in after for tensor in node.outputs]
        found = self._gradients(outer, dict(values), beside)
        values.update({key: value for key, value in found.items() if key not in values})

    def _gradients(self, nodes: Sequence[Any], known: Values, beside: Sequence[Any]) -> Values:
        """The gradients that some nodes stand for, and what else was computed on the way."""
        losses = list({_key(n.operation): n.operation.ys for n in nodes}.values())
        variables = {id(v): v for node in nodes for v in node.operation.variables}
        xs = {id(x): x for node in nodes for x in node.operation.xs}
        behind = [t for node in nodes for t in through(node.operation, self.fed)]
        shifted = [x for x in xs.values() if id(x) not in known]
        order = [*(key for key in xs if key in known), *map(id, shifted)]
        at = [known[key] for key in xs if key in known] + self._zeros(shifted, known)
        known = self._without_path(known, losses, {*variables, *xs})
        keys: list[int] = []

        def totals(tensors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            given = dict(zip(order, tensors, strict=True))
            shifts = {id(x): given.pop(id(x)) for x in shifted}
            here = {**known, **given}
            inside = Computation(self.fed, {**self._shifts, **shifts}, self._past)
            inside._path = set(needed(y for ys in losses for y in ys))
            for tensor in behind:
                inside._go_on_behind(tensor, here)
            inside.add([*(y for ys in losses for y in ys), *beside], here)
            keys[:] = [key for key in here if key not in known]
            sums = [[_summed(here[id(y)]) for y in ys] for ys in losses]
            return [sum(one[1:], one[0]) for one in sums], [here[key] for key in keys]

        try:
            aux, by_variable, by_x = differentiated(totals, list(variables.values()), at)
        except ValueError as error:
            loops = _endless(nodes) if "while_loop" in str(error) else []
            if not loops:
                raise
            raise _no_way_back(loops[0]) from error
        found = dict(zip(keys, aux, strict=True))
        for ys, ours, theirs in zip(losses, by_variable, by_x, strict=True):
            by = dict(zip(variables, ours, strict=True)) | dict(zip(order, theirs, strict=True))
            for operation, outputs in ((node.operation, node.outputs) for node in nodes):
                if _key(operation) == tuple(map(id, ys)):
                    asked = operation.xs or operation.variables
                    found |= {id(t): by[id(x)] for t, x in zip(outputs, asked, strict=True)}
        return found

    def _without_path(self, known: Values, losses: Any, wanted: set[int]) -> Values:
        """What is known, but for what lies between losses and what they are differentiated by."""
        nodes = needed((y for ys in losses for y in ys), self.fed)
        roots = {n for n in nodes if wanted & {id(x) for x in (*n.outputs, *variables_in(n))}}
        roots |= {n for n in nodes if getattr(n.operation, "is_opaque", False)}
        path = {id(t) for node in downstream(nodes, roots) for t in node.outputs}
        past = [tensor for key, tensor in self._past.items() if key in path - set(self.fed)]
        past = [tensor for tensor in past if node_of(tensor).input_tensors]
        if past:
            raise ArgumentError(
                "graph.gradients",
                "ys",
                "a tensor that is written inside `control_dependencies` as a whole, or outside",
                f"one of `{label(past[0])}`, which is computed before the updates",
                "write all of the loss inside the block, or all of it outside",
            )
        return {key: value for key, value in known.items() if key in self.fed or key not in path}

    def _zeros(self, tensors: Sequence[Any], known: Values) -> list[Any]:
        """Zeros in the shapes of tensors, which are computed for it, and forgotten."""
        if not tensors:
            return []
        values = dict(known)
        with discarded():
            self.add(tensors, values)
        return [ops.zeros_like(values[id(tensor)]) for tensor in tensors]

    def _go_on_behind(self, tensor: Any, values: Values) -> None:
        """Gives a tensor that is fed the gradient of what it is made of; its value stays."""
        node, given = node_of(tensor), values[id(tensor)]
        self.add(node.input_tensors, values)
        made = {key: value for key, value in values.items() if key != id(tensor)}
        self._run(node, made)
        own = made[id(tensor)]
        values[id(tensor)] = given + (own - ops.stop_gradient(own))


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
    """Whether what is computed now is differentiated, by this thread."""
    return _local.depth > 0


def _takes_functions(node: Any) -> bool:
    if isinstance(node.operation, (Made, keras.Layer)):
        return False
    own = [value for key, value in vars(node.operation).items() if not key.startswith("_")]
    given = keras.tree.flatten([node.arguments.args, node.arguments.kwargs, own])
    return any(callable(each) and not isinstance(each, type) for each in given)


def _closes_over(node: Any) -> ArgumentError:
    name = keras.src.utils.naming.to_snake_case(type(node.operation).__name__)
    cure = "pass them as arguments: `graph.call(function, *tensors)`"
    if name in ("cond", "while_loop"):
        cure = (
            f"write `graph.{name}`, whose functions may take tensors from around them; if Keras "
            "wrote it, as in `keras.losses.hinge`, call that as a whole: `graph.call(fn, *tensors)`"
        )
    elif name != "call":
        cure = (
            f"write a function of these tensors that calls `keras.ops.{name}`, and make it a node "
            "with `graph.call(function, *tensors)`"
        )
    return ArgumentError(
        "graph.call" if name == "call" else f"keras.ops.{name}",
        "fn" if name == "call" else "functions",
        "functions that take all tensors as arguments",
        "functions that take tensors of the graph from around them, perhaps",
        cure,
    )


def _endless(nodes: Sequence[Any]) -> list[Any]:
    """The loops without a number of turns that gradients go through."""
    under = needed(y for node in nodes for y in node.operation.ys)
    return [n for n in with_inner(under) if getattr(n.operation, "is_endless", False)]


def _no_way_back(loop: Any) -> ArgumentError:
    return ArgumentError(
        "graph.gradients",
        "ys",
        f"a tensor that {current().name} can differentiate",
        f"one of the loop `{label(loop.outputs[0])}`, which may take any number of turns",
        "give it `maximum_iterations=` as a number; or write `keras.ops.scan` or "
        "`keras.ops.fori_loop` in a function for `graph.call`",
    )


def _summed(value: Any) -> Any:
    return ops.sum(value) if len(value.shape) else value


def _key(operation: Gradients) -> tuple[int, ...]:
    return tuple(map(id, operation.ys))


def computed(tensors: Sequence[Any]) -> list[Any]:
    """Tensors that need no feeding."""
    values: Values = {}
    Computation().add(tensors, values)
    return [values[id(tensor)] for tensor in tensors]


def through(operation: Gradients, fed: Collection[int]) -> list[Any]:
    """The tensors that are fed, and that stand between a tensor and what it is differentiated by.

    A feed changes a value, and not what it is made of: gradients go on behind it.
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
    """Whether a node was not known; gradients are where the tensors are that they are of."""
    if isinstance(node.operation, Gradients):
        return any(is_new(made, known) for y in node.operation.ys if (made := node_of(y)))
    return node not in known
