"""What a function writes while it is called: the body of a branch, or of a loop.

The function is called once, when the graph is built. Nodes that it makes are computed only where
the body is; tensors from around it are the body's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keras import ops, tree

from trainstep._common.errors import ArgumentError
from trainstep.graph._evaluate import Computation, Gradients, is_new
from trainstep.graph._graph import get_default_graph
from trainstep.graph._operations import Operation
from trainstep.graph._sources import Read
from trainstep.graph._tensors import Made, describe, label, node_of
from trainstep.graph._traverse import needed, nodes_from, variables_in
from trainstep.graph._variables import as_tensor


@dataclass(frozen=True)
class Body:
    """What a function wrote.

    Attributes:
        returned: What it returned, with symbolic tensors in it.
        outputs: The tensors in that.
        nodes: What is computed for them inside, each after those that it needs.
        inputs: The tensors from around it.
        operations: What it returned, if that is operations; the outputs are then their inputs.
    """

    returned: Any
    outputs: list[Any]
    nodes: list[Any]
    inputs: list[Any]
    operations: list[Operation] | None = None

    def run(self, values: Mapping[int, Any]) -> list[Any]:
        """The outputs, of the values of the inputs by their ids."""
        known = dict(values)
        Computation(values).add(self.outputs, known)
        return [ops.cast(known[id(tensor)], tensor.dtype) for tensor in self.outputs]


class Holding(Made):
    """An operation that has bodies."""

    def __init__(self, bodies: Sequence[Body]) -> None:
        super().__init__()
        self.bodies = bodies
        self.inner = [node for body in bodies for node in body.nodes]
        self.is_opaque = any(getattr(node.operation, "is_opaque", False) for node in self.inner)

    def uses(self) -> list[Any]:
        return used_by(self.inner)


def used_by(nodes: Sequence[Any]) -> list[Any]:
    """What nodes run of the user's code, and the variables that they read."""
    found: list[Any] = []
    for node in nodes:
        own = node.operation
        found += own.uses() if isinstance(own, Made) else [own]
        found += variables_in(node)
    return found


def distinct(tensors: Collection[Any]) -> list[Any]:
    """Tensors without those that come again."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def written(
    fn: Callable[..., Any],
    args: Sequence[Any],
    function: str,
    argument: str,
    *,
    updates: bool = False,
) -> Body:
    """Calls a function, and finds what it wrote.

    Args:
        fn: The function.
        args: Its arguments.
        function: Of which function of ours it is an argument, for messages.
        argument: And which one.
        updates: Whether it may return operations instead of tensors.
    """
    graph = get_default_graph()
    if not callable(fn):
        raise ArgumentError(
            function, argument, "a function", f"a {type(fn).__name__}", "write `lambda: ...`"
        )
    known, count, first = nodes_from(graph.sources), graph.count, len(graph.operations)
    returned = fn(*args)
    found = tree.flatten(returned)
    done = graph.operations[first:]
    operations = None
    if updates and found and all(each is None or isinstance(each, Operation) for each in found):
        operations = _with_parts(found, done, function, argument)
        flat = [tensor for operation in operations for tensor in operation.inputs]
    else:
        flat = [_tensor(each, function, argument) for each in found]
        returned = tree.pack_sequence_as(returned, flat)
    if graph.count - count != (0 if operations is None else len(done)):
        came = "a `control_dependencies`" if not done or operations else "an operation"
        raise _writes(function, argument, f"{came} inside")
    new = [node for node in nodes_from(graph.sources) if node not in known]
    inner = {node for node in new if _stays_inside(node, known)}
    graph.revision += 1
    graph.inside.update(dict.fromkeys([*inner, *done], function))
    nodes, inputs = _bounded(flat, inner)
    _check_gradients(nodes, inputs, function, argument)
    return Body(returned, flat, nodes, inputs, operations)


def _bounded(outputs: Sequence[Any], inner: Collection[Any]) -> tuple[list[Any], list[Any]]:
    """The inner nodes that outputs need, and what these take from outside."""
    used = [*(t for node in inner for t in node.input_tensors), *outputs]
    nodes = needed(outputs, {id(t) for t in used if node_of(t) not in inner})
    used = [*(t for node in nodes for t in node.input_tensors), *outputs]
    return nodes, distinct([t for t in used if node_of(t) not in inner])


def _with_parts(
    found: Sequence[Any], done: Sequence[Operation], function: str, argument: str
) -> list[Operation]:
    """Operations that a function returned, and their parts, in the order of their making."""
    todo = [each for each in found if each is not None]
    own, every = set(map(id, done)), {}
    while todo:
        each = todo.pop()
        every[id(each)] = each
        todo += getattr(each, "parts", ())
    other = next((each for each in every.values() if id(each) not in own), None)
    if other is not None:
        raise ArgumentError(
            function,
            argument,
            "operations that the function makes itself",
            f"{describe(other)}, which is none of them",
            "make it inside of the function: `lambda: w.assign(...)`",
        )
    inside = get_default_graph().inside
    left = next((each for each in done if id(each) not in every and each not in inside), None)
    if left is not None:
        raise ArgumentError(
            function,
            argument,
            "a function that returns the operations that it makes",
            f"{describe(left)}, which it does not return",
            "return it; several as a list, or as a `graph.group`",
        )
    return sorted(every.values(), key=lambda operation: operation.index)


def _stays_inside(node: Any, known: Collection[Any]) -> bool:
    """Whether a new node is computed in the body: what is fed or read is an input of it."""
    operation = node.operation
    if isinstance(operation, Gradients):
        return is_new(node, known)
    return not (isinstance(operation, Read) or getattr(operation, "is_fed", False))


def _tensor(value: Any, function: str, argument: str) -> Any:
    if isinstance(value, Operation):
        raise _writes(function, argument, f"the operation `{value.name}`")
    if value is None:
        raise ArgumentError(
            function,
            argument,
            "a function that returns a tensor, or a structure of them",
            "one that returns None",
            "return a tensor",
        )
    return as_tensor(value, function, argument)


def _writes(function: str, argument: str, came: str) -> ArgumentError:
    return ArgumentError(
        function,
        argument,
        "a function that returns tensors, and updates nothing",
        came,
        "return the new value, and write the operation outside: "
        f"`w.assign({function}(...))`, with `w` itself as the value that changes nothing",
    )


def _check_gradients(
    nodes: Sequence[Any], inputs: Sequence[Any], function: str, argument: str
) -> None:
    """Refuses gradients that would have to go on outside of the body."""
    for node in nodes:
        if not isinstance(node.operation, Gradients):
            continue
        by = {id(x) for x in node.operation.xs}
        behind = needed([t for each in inputs if (n := node_of(each)) for t in n.input_tensors])
        if node.operation.variables or by & {id(t) for each in behind for t in each.outputs}:
            raise ArgumentError(
                function,
                argument,
                "gradients that stay inside: by tensors that what is differentiated takes itself",
                f"`{label(node.outputs[0])}`, which goes on outside of the function",
                "write what is differentiated outside of the function; or differentiate what "
                f"`{function}` returns: `graph.gradients({function}(...), xs)`",
            )
