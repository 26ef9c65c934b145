"""Computes tensors of a graph inside a step: each node once, forward passes shared.

Gradients come first. What they are gradients of is computed inside the differentiation, and with it
everything else that does not depend on them, so that a loss, its gradients and the outputs beside
them are one forward pass. If several losses are differentiated, all but the last are computed
apart, from the same state, and what they write (statistics, seeds) is forgotten, so that it is
written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
from keras import ops

from trainstep._grad import value_and_grad
from trainstep._state import discarded
from trainstep.graph._tensors import Made, node_of
from trainstep.graph._walk import downstream, needed

Values = dict[int, Any]  # by the id of a tensor


class Gradients(Made):
    """Gradients of the sum of some tensors.

    Args:
        ys: The tensors.
        variables: The Keras variables to differentiate by.
        xs: The tensors to differentiate by, instead of variables.
    """

    kind = "gradients"

    def __init__(self, ys: Sequence[Any], variables: Sequence[Any], xs: Sequence[Any]) -> None:
        super().__init__()
        self.ys, self.variables, self.xs = list(ys), list(variables), list(xs)

    def call(self, *args: Any) -> Any:  # pragma: no cover: it is computed here, below
        raise RuntimeError("gradients are computed with what they are gradients of")


def computed(tensors: Sequence[Any]) -> list[Any]:
    """Tensors that need no feeding."""
    values: Values = {}
    compute(tensors, values)
    return [values[id(tensor)] for tensor in tensors]


def compute(tensors: Iterable[Any], values: Values) -> None:
    """Adds the values of tensors, and of what they need, to those that are known."""
    tensors = list(tensors)
    nodes = needed(tensors, values)
    if any(isinstance(node.operation, Gradients) for node in nodes):
        _differentiate(nodes, values)
    for node in nodes:
        if any(id(output) not in values for output in node.outputs):
            _run(node, values)


def _run(node: Any, values: Values) -> None:
    args, kwargs = node.arguments.fill_in(values)
    outputs = node.operation(*args, **kwargs)
    for tensor, value in zip(node.outputs, keras.tree.flatten(outputs), strict=True):
        values[id(tensor)] = value


def _differentiate(nodes: Sequence[Any], values: Values) -> None:
    """Computes the gradients among nodes that are not part of what others are gradients of."""
    all_of = [node for node in nodes if isinstance(node.operation, Gradients)]
    inner = {each for node in all_of for each in needed(node.operation.ys, values)}
    outer = [node for node in all_of if node not in inner]
    # What depends on none of them is part of the last forward pass.
    after = downstream(nodes, set(outer))
    beside = [tensor for node in nodes if node not in after for tensor in node.outputs]
    *first, last = _tasks(outer)
    for task in first:
        with discarded():
            task.run(values, ())
    last.run(values, beside)


class _Task:
    """One differentiation: of the same tensors, by variables or by tensors."""

    def __init__(self, ys: Sequence[Any]) -> None:
        self.ys = list(ys)
        self.variables: dict[int, Any] = {}
        self.xs: dict[int, Any] = {}
        self.nodes: list[Any] = []

    def add(self, node: Any) -> None:
        self.nodes.append(node)
        self.variables |= {id(v): v for v in node.operation.variables}
        self.xs |= {id(x): x for x in node.operation.xs}

    def run(self, values: Values, beside: Sequence[Any]) -> None:
        """Adds the gradients, and what else was computed on the way."""
        wanted = [*self.ys, *beside]
        if self.xs:
            compute(self.xs.values(), values)
            at = [values[key] for key in self.xs]
        else:
            at = []
        known = dict(values)
        computed_ids: list[int] = []

        def total(*xs: Any) -> tuple[Any, list[Any]]:
            here = {**known, **dict(zip(self.xs, xs, strict=True))}
            compute(wanted, here)
            computed_ids[:] = [key for key in here if key not in known]
            sums = [ops.sum(here[id(y)]) for y in self.ys]
            return sum(sums[1:], sums[0]), [here[key] for key in computed_ids]

        differentiated = self._by(total)
        (_, found), gradients = differentiated(*at)
        if beside:
            values.update(zip(computed_ids, found, strict=True))
        by = dict(zip(self.xs or self.variables, gradients, strict=True))
        for node in self.nodes:
            asked = node.operation.xs or node.operation.variables
            for tensor, x in zip(node.outputs, asked, strict=True):
                values[id(tensor)] = by[id(x)]

    def _by(self, total: Callable[..., Any]) -> Callable[..., Any]:
        if self.xs:
            return value_and_grad(total, argnums=tuple(range(len(self.xs))), has_aux=True)
        return value_and_grad(total, list(self.variables.values()), has_aux=True)


def _tasks(nodes: Sequence[Any]) -> list[_Task]:
    tasks: dict[Any, _Task] = {}
    for node in nodes:
        operation = node.operation
        key: Any = tuple(map(id, operation.ys))
        if operation.xs:
            # A tensor that another one is made of is no constant to its gradient.
            key = (key, tuple(map(id, operation.xs)))
        tasks.setdefault(key, _Task(operation.ys)).add(node)
    return list(tasks.values())


def is_new_in(block: Any, node: Any) -> bool:
    """Whether a node is computed in a block; gradients are where their tensors are."""
    if node is not None and isinstance(node.operation, Gradients):
        return any(is_new_in(block, node_of(y)) for y in node.operation.ys)
    return node is not None and bool(block.is_new(node))
