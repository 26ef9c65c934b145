"""Training operations of the graph, with any Keras optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import keras

from trainstep._common.errors import ArgumentError
from trainstep._state.optimizer_slots import innermost, make_known
from trainstep.graph._gradients import gradients
from trainstep.graph._operations import Operation
from trainstep.graph._tensors import describe
from trainstep.graph._variables import as_tensor, read, variable_of, variables_under

__all__ = ["apply_gradients", "compute_gradients", "minimize"]


class _Apply(Operation):
    kind = "train"

    def __init__(
        self,
        name: str | None,
        optimizer: Any,
        pairs: Sequence[tuple[Any, Any]],
        around: Callable[[], Any],
    ) -> None:
        self.optimizer, self._around = optimizer, around
        self.variables = [variable for _, variable in pairs]
        super().__init__(name, [gradient for gradient, _ in pairs], self.variables)
        self.graph.optimizers.append(optimizer)

    def perform(self, values: list[Any]) -> None:
        with self._around():
            self.optimizer.apply(values, self.variables)

    def uses(self) -> list[Any]:
        return [self.optimizer]


def minimize(
    optimizer: Any, loss: Any, var_list: Sequence[Any] | None = None, name: str | None = None
) -> Operation:
    """Makes an operation that updates variables by the gradients of a loss.

    Args:
        optimizer: A Keras optimizer, or its name.
        loss: The tensor to minimize.
        var_list: The variables; by default, all trainable variables that the loss depends on.
        name: The operation's name.

    Example:
        >>> import keras
        >>> from trainstep import graph
        >>> w, session = graph.Variable(1.0), graph.Session()
        >>> loss = (w - 3.0) ** 2
        >>> train = graph.train.minimize(keras.optimizers.SGD(0.25), loss)
        >>> _, before = session.run([train, loss])
        >>> float(before), float(session.run(w))
        (4.0, 2.0)
    """
    optimizer = _optimizer(optimizer, "graph.train.minimize")
    pairs = compute_gradients(optimizer, loss, var_list)
    return apply_gradients(optimizer, pairs, name)


def compute_gradients(
    optimizer: Any, loss: Any, var_list: Sequence[Any] | None = None
) -> list[tuple[Any, Any]]:
    """Makes pairs of a gradient and its variable, the argument of `apply_gradients`.

    If the optimizer scales its loss, the gradients are scaled.

    Example:
        >>> import keras
        >>> from trainstep import graph
        >>> w, session = graph.Variable(1.0), graph.Session()
        >>> sgd = keras.optimizers.SGD(1.0)
        >>> pairs = graph.train.compute_gradients(sgd, 5.0 * w)
        >>> clipped = [(graph.clip_by_value(g, -1.0, 1.0), v) for g, v in pairs]
        >>> session.run(graph.train.apply_gradients(sgd, clipped))
        >>> float(session.run(w))
        0.0
    """
    function = "graph.train.compute_gradients"
    optimizer = _optimizer(optimizer, function)
    loss = as_tensor(loss, function, "loss")
    if var_list is None:
        variables = [v for v in variables_under([loss]) if v.trainable]
    else:
        given = var_list if isinstance(var_list, (list, tuple)) else [var_list]
        variables = [variable_of(each, function, "var_list") for each in given]
    if not variables:
        raise ArgumentError(
            function,
            "var_list",
            "variables to train",
            f"none, and {describe(loss)} depends on no trainable variable",
            "compute the loss from trainable variables, or pass `var_list=`: the graph does not "
            "know the variables inside a `graph.call`",
        )
    build(optimizer, variables)
    scaled = innermost(optimizer) is not optimizer or getattr(optimizer, "loss_scale_factor", None)
    found = gradients(optimizer.scale_loss(loss) if scaled else loss, variables)
    return list(zip(found, map(read, variables), strict=True))


def apply_gradients(
    optimizer: Any,
    grads_and_vars: Iterable[tuple[Any, Any]],
    name: str | None = None,
    *,
    around: Callable[[], Any] = contextlib.nullcontext,
) -> Operation:
    """Makes an operation that updates variables by given gradients.

    Args:
        optimizer: A Keras optimizer, or its name.
        grads_and_vars: Pairs of a gradient and its variable; a pair with None is skipped.
        name: The operation's name.
        around: Returns the context manager in which the optimizer runs.

    Example:
        >>> import keras
        >>> from trainstep import graph
        >>> w, session = graph.Variable([1.0, 1.0]), graph.Session()
        >>> (dw,) = graph.gradients(3.0 * w, [w])
        >>> train = graph.train.apply_gradients(keras.optimizers.SGD(1.0), zip([dw], [w]))
        >>> session.run(train)
        >>> session.run(w).tolist()
        [-2.0, -2.0]
    """
    function = "graph.train.apply_gradients"
    optimizer = _optimizer(optimizer, function)
    pairs = [
        (as_tensor(g, function, "grads_and_vars"), variable_of(v, function, "grads_and_vars"))
        for g, v in map(_pair, grads_and_vars)
        if g is not None
    ]
    if not pairs:
        raise ArgumentError(
            function,
            "grads_and_vars",
            "at least one gradient",
            "none",
            "pass zip(grads, variables)",
        )
    for gradient, variable in pairs:
        if tuple(gradient.shape) != tuple(variable.shape):
            raise ArgumentError(
                function,
                "grads_and_vars",
                f"a gradient of the shape of {describe(variable)}, {tuple(variable.shape)}",
                describe(gradient),
                "pair each gradient with its own variable",
            )
    build(optimizer, [variable for _, variable in pairs])
    return _Apply(name, optimizer, pairs, around)


def _pair(given: Any) -> tuple[Any, Any]:
    if not isinstance(given, (list, tuple)) or len(given) != 2:
        raise ArgumentError(
            "graph.train.apply_gradients",
            "grads_and_vars",
            "pairs of a gradient and its variable",
            f"a {type(given).__name__}",
            "write `zip(gradients, variables)`",
        )
    return given[0], given[1]


def _optimizer(optimizer: Any, function: str) -> Any:
    try:
        return keras.optimizers.get(optimizer)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            function,
            "optimizer",
            "a Keras optimizer, or its name",
            repr(optimizer),
            "pass an optimizer, for example `keras.optimizers.SGD(0.1)`",
        ) from error


def build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Builds an optimizer for variables; a built optimizer gets slots for the new ones."""
    if not optimizer.built:
        optimizer.build(list(variables))
        return
    known = list(innermost(optimizer)._trainable_variables)
    union = list({id(v): v for v in (*known, *variables)}.values())
    make_known(optimizer, SimpleNamespace(trainable_variables=list(variables), variables=union))
