"""`Body`: the nodes that a function of `cond` or `while_loop` builds.

The function is called once, when the graph is built. Its nodes are computed only inside the branch
or loop; the tensors that it captures are the inputs of the body.
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
from trainstep.graph._tensors import NodeOperation, describe, label, node_of
from trainstep.graph._traverse import needed, nodes_from, variables_in
from trainstep.graph._variables import as_tensor


@dataclass(frozen=True)
class Body:
    """The nodes, inputs and outputs of a function.

    Attributes:
        returned: The structure of symbolic tensors or operations that it returned.
        outputs: The tensors in `returned`.
        nodes: The inner nodes that compute the outputs, in topological order.
        inputs: The captured tensors.
        operations: The operations in `returned`, if any; `outputs` are then their inputs.
    """

    returned: Any
    outputs: list[Any]
    nodes: list[Any]
    inputs: list[Any]
    operations: list[Operation] | None = None

    def run(self, values: Mapping[int, Any]) -> list[Any]:
        """Computes the outputs from the values of the inputs, by id."""
        known = dict(values)
        Computation(values).add(self.outputs, known)
        return [ops.cast(known[id(tensor)], tensor.dtype) for tensor in self.outputs]


class OperationWithBodies(NodeOperation):
    """A node whose operation runs bodies."""

    def __init__(self, bodies: Sequence[Body]) -> None:
        super().__init__()
        self.bodies = bodies
        self.inner = [node for body in bodies for node in body.nodes]
        self.is_opaque = any(getattr(node.operation, "is_opaque", False) for node in self.inner)

    def uses(self) -> list[Any]:
        return user_objects(self.inner)


def user_objects(nodes: Sequence[Any]) -> list[Any]:
    """Returns the objects with user code that nodes run, and the variables that they read."""
    found: list[Any] = []
    for node in nodes:
        own = node.operation
        found += own.uses() if isinstance(own, NodeOperation) else [own]
        found += variables_in(node)
    return found


def distinct(tensors: Collection[Any]) -> list[Any]:
    """Removes duplicates, by identity."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def build_body(
    fn: Callable[..., Any],
    args: Sequence[Any],
    function: str,
    argument: str,
    *,
    updates: bool = False,
) -> Body:
    """Calls a function, and finds the nodes that it builds.

    Args:
        fn: The function.
        args: Its arguments.
        function: The public function that received `fn`, for messages.
        argument: The name of `fn` among the arguments of that function.
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
        got = "a `control_dependencies`" if not done or operations else "an operation"
        raise _writes(function, argument, f"{got} inside")
    new = [node for node in nodes_from(graph.sources) if node not in known]
    inner = {node for node in new if _stays_inside(node, known)}
    graph.body_owner.update(dict.fromkeys([*inner, *done], function))
    graph.revision += 1
    nodes, inputs = _bounded(flat, inner)
    _check_gradients(nodes, inputs, function, argument)
    return Body(returned, flat, nodes, inputs, operations)


def _bounded(outputs: Sequence[Any], inner: Collection[Any]) -> tuple[list[Any], list[Any]]:
    """The inner nodes that outputs need, and the outer tensors that these use."""
    used = [*(t for node in inner for t in node.input_tensors), *outputs]
    nodes = needed(outputs, {id(t) for t in used if node_of(t) not in inner})
    used = [*(t for node in nodes for t in node.input_tensors), *outputs]
    return nodes, distinct([t for t in used if node_of(t) not in inner])


def _with_parts(
    found: Sequence[Any], done: Sequence[Operation], function: str, argument: str
) -> list[Operation]:
    """The operations that a function returned, and their parts, in the order of creation."""
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
            f"{describe(other)}, which was made outside",
            "make it inside the function: `lambda: w.assign(...)`",
        )
    inside = get_default_graph().body_owner
    left = next((each for each in done if id(each) not in every and each not in inside), None)
    if left is not None:
        raise ArgumentError(
            function,
            argument,
            "a function that returns the operations that it makes",
            f"{describe(left)}, which it does not return",
            "return it; return several as a list, or as a `graph.group`",
        )
    return sorted(every.values(), key=lambda operation: operation.index)


def _stays_inside(node: Any, known: Collection[Any]) -> bool:
    """Whether a new node belongs to the body; placeholders and variables are its inputs."""
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
            "a function that returns a tensor, or a structure of tensors",
            "a function that returns None",
            "return a tensor",
        )
    return as_tensor(value, function, argument)


def _writes(function: str, argument: str, got: str) -> ArgumentError:
    return ArgumentError(
        function,
        argument,
        "a function that returns tensors, and updates no variable",
        got,
        "return the new value, and make the operation outside: "
        f"`w.assign({function}(...))`; return `w` itself to leave it unchanged",
    )


def _check_gradients(
    nodes: Sequence[Any], inputs: Sequence[Any], function: str, argument: str
) -> None:
    """Rejects gradients whose path leaves the body."""
    for node in nodes:
        if not isinstance(node.operation, Gradients):
            continue
        by = {id(x) for x in node.operation.xs}
        behind = needed([t for each in inputs if (n := node_of(each)) for t in n.input_tensors])
        if node.operation.variables or by & {id(t) for each in behind for t in each.outputs}:
            raise ArgumentError(
                function,
                argument,
                "gradients whose path stays inside the function",
                f"`{label(node.outputs[0])}`, whose path leaves the function",
                "compute the loss outside the function; or differentiate the result of "
                f"`{function}`: `graph.gradients({function}(...), xs)`",
            )
