"""The result of `cond` for functions that return operations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from keras import ops

from trainstep.graph._function_bodies import Body, distinct, user_objects
from trainstep.graph._operations import Operation


class ConditionalOperation(Operation):
    """Performs the operations of one of two branches."""

    kind = "cond"

    def __init__(
        self, name: str | None, pred: Any, bodies: Sequence[Body], inputs: Sequence[Any]
    ) -> None:
        self._bodies, self._keys = bodies, list(map(id, inputs))
        own = [operation for body in bodies for operation in body.operations or ()]
        super().__init__(name, [pred, *inputs], distinct([v for each in own for v in each.writes]))
        self._own = own

    def perform(self, values: list[Any]) -> None:
        pred, *inputs = values
        known = dict(zip(self._keys, inputs, strict=True))

        def branch(body: Body) -> Any:
            left = iter(body.run(known))
            for operation in body.operations or ():
                operation.perform([next(left) for _ in operation.inputs])
            return ops.zeros((), "int32")  # Keras needs an output from each branch

        ops.cond(pred, *(partial(branch, body) for body in self._bodies))

    def uses(self) -> list[Any]:
        nodes = [node for body in self._bodies for node in body.nodes]
        return [
            *user_objects(nodes),
            *(each for operation in self._own for each in operation.uses()),
        ]
