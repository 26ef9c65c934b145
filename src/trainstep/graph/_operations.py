"""Operations: the updates of a run. An operation has no value."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
from keras import ops

from trainstep._common.errors import ArgumentError
from trainstep._state.optimizer_slots import innermost
from trainstep.graph._evaluate import is_new
from trainstep.graph._graph import Block, Graph, get_default_graph
from trainstep.graph._tensors import describe
from trainstep.graph._traverse import nodes_from
from trainstep.graph._variables import Variable, as_tensor, variable_of, variables_of

if TYPE_CHECKING:
    from trainstep.graph._session import Session


class Operation:
    """An update that a run performs. A fetched operation returns None.

    Attributes:
        name: Its name.
        inputs: The tensors whose values it uses.
        writes: The Keras variables that it sets.
        parts: Other operations that run with it.
    """

    kind = "operation"

    def __init__(self, name: str | None, inputs: Sequence[Any], writes: Sequence[Any]) -> None:
        self.graph: Graph = get_default_graph()
        self.name = self.graph.add(self, name, self.kind)
        self.inputs, self.writes = list(inputs), list(writes)
        self.parts: list[Operation] = []
        self.block: Block | None = self.graph.blocks.current
        self.index = self.graph.next_index()
        self.graph.operations.append(self)

    def perform(self, values: list[Any]) -> None:
        """Performs the update, inside a step.

        Args:
            values: The values of its inputs.
        """

    def run(self, feed_dict: Any = None, session: Session | None = None) -> None:
        """Runs it in the given session, or in the default session."""
        from trainstep.graph._session import session_for

        session_for(session, "Operation.run").run(self, feed_dict)

    def uses(self) -> list[Any]:
        """The objects that run user code."""
        return []

    def __repr__(self) -> str:
        return f"<graph.Operation {self.name}>"


class _Assign(Operation):
    def __init__(self, kind: str, variable: Any, value: Any, name: str | None) -> None:
        self.kind = kind
        super().__init__(name, [value], [variable])

    def perform(self, values: list[Any]) -> None:
        (variable,), (value,) = self.writes, values
        value = ops.cast(value, variable.dtype)
        if self.kind == "assign_add":
            value = variable.value + value
        elif self.kind == "assign_sub":
            value = variable.value - value
        variable.assign(value)


def _assignment(kind: str, ref: Any, value: Any, name: str | None) -> Operation:
    function = f"graph.{kind}"
    variable = variable_of(ref, function, "ref")
    value = as_tensor(value, function, "value", str(variable.dtype))
    if "float" in str(value.dtype) and "float" not in str(variable.dtype):
        raise ArgumentError(
            function,
            "value",
            f"values that {variable.dtype} can hold, the dtype of the variable",
            describe(value),
            "round and cast it with `keras.ops.cast`",
        )
    sizes = zip(value.shape, variable.shape, strict=False)
    fits = len(value.shape) == len(variable.shape) and all(a in (b, None) for a, b in sizes)
    if not fits and not (
        kind != "assign" and not value.shape
    ):  # a number is added to every element
        raise ArgumentError(
            function,
            "value",
            f"the shape of the variable, {tuple(variable.shape)}",
            describe(value),
            "reshape it, or broadcast it with `keras.ops.broadcast_to`",
        )
    return _Assign(kind, variable, value, name)


def assign(ref: Any, value: Any, name: str | None = None) -> Operation:
    """Makes an operation that sets a variable.

    Args:
        ref: A `Variable`, or a Keras variable.
        value: A tensor or a value of the variable's shape.
        name: The operation's name.

    Example:
        >>> from trainstep import graph
        >>> w, session = graph.Variable(1.0), graph.Session()
        >>> session.run(graph.assign(w, w + 4.0))
        >>> float(session.run(w))
        5.0
    """
    return _assignment("assign", ref, value, name)


def assign_add(ref: Any, value: Any, name: str | None = None) -> Operation:
    """Makes an operation that adds to a variable.

    Example:
        >>> from trainstep import graph
        >>> w, session = graph.Variable(1.0), graph.Session()
        >>> session.run(graph.assign_add(w, 2.0))
        >>> float(session.run(w))
        3.0
    """
    return _assignment("assign_add", ref, value, name)


def assign_sub(ref: Any, value: Any, name: str | None = None) -> Operation:
    """Makes an operation that subtracts from a variable.

    Example:
        >>> from trainstep import graph
        >>> w, session = graph.Variable(1.0), graph.Session()
        >>> session.run(graph.assign_sub(w, 2.0))
        >>> float(session.run(w))
        -1.0
    """
    return _assignment("assign_sub", ref, value, name)


class _Group(Operation):
    kind = "group"


def group(*operations: Any, name: str | None = None) -> Operation:
    """Makes one operation that runs several.

    Example:
        >>> from trainstep import graph
        >>> a, b, session = graph.Variable(1.0), graph.Variable(2.0), graph.Session()
        >>> session.run(graph.group(a.assign(b), b.assign(a)))  # both read before either writes
        >>> [float(v) for v in session.run([a, b])]
        [2.0, 1.0]
    """
    made = _Group(name, [], [])
    made.parts = _operations(operations, "graph.group", "operations")
    return made


def no_op(name: str | None = None) -> Operation:
    """Makes an operation without an update; inside a block, it runs the operations before it.

    Example:
        >>> from trainstep import graph
        >>> graph.Session().run(graph.no_op())
    """
    return _Group(name, [], [])


def _operations(given: Sequence[Any], function: str, argument: str) -> list[Any]:
    flat = keras.tree.flatten(list(given))
    kinds = (Operation, keras.KerasTensor)
    wrong = next((each for each in flat if not isinstance(each, kinds)), None)
    if wrong is not None:
        raise ArgumentError(
            function,
            argument,
            "operations of the graph",
            f"a {type(wrong).__name__}",
            "pass results of `assign`, `train.minimize` and similar functions",
        )
    return list(flat)


@contextlib.contextmanager
def control_dependencies(operations: Any) -> Iterator[None]:
    """Delays the tensors and operations that are built inside until after other operations.

    Args:
        operations: The operations that run first; None removes those of the enclosing blocks.

    Example:
        >>> from trainstep import graph
        >>> w, session = graph.Variable(1.0), graph.Session()
        >>> double = w.assign(2 * w)
        >>> with graph.control_dependencies([double]):
        ...     more = w.assign(w + 10.0)
        >>> session.run(more)
        >>> float(session.run(w))
        12.0
    """
    graph = get_default_graph()
    outer = graph.blocks.current
    given = [operations] if isinstance(operations, (Operation, keras.KerasTensor)) else operations
    after = _operations(given or (), "graph.control_dependencies", "operations")
    known = set(nodes_from(graph.sources))
    if operations is None:
        graph.blocks.current = None
    elif after:
        graph.blocks.current = Block(after, outer, graph.next_index())
    block = graph.blocks.current
    try:
        yield
    finally:
        graph.blocks.current = outer
        if block is not outer:
            for node in nodes_from(graph.sources):
                if node.input_tensors and is_new(node, known):
                    graph.block_of.setdefault(node, block)
            graph.revision += 1  # last: another thread may plan meanwhile


class _Initialize(Operation):
    kind = "init"

    def __init__(self, name: str | None) -> None:
        graph = get_default_graph()
        own = [s for s in graph.sources if isinstance(s, Variable) and s.initial is not None]
        others = {id(v): v for v in variables_of(graph)}
        for each in own:
            others.pop(id(each.variable), None)
        pairs = [(v, v.value) for v in others.values()]
        pairs += [pair for optimizer in graph.optimizers for pair in _initial_values(optimizer)]
        # Variables, because constants would be stored in the program, and weights may be large.
        self._saved = [
            keras.Variable(ops.convert_to_numpy(value), dtype=v.dtype, trainable=False)
            for v, value in pairs
        ]
        writes = [*(each.variable for each in own), *(v for v, _ in pairs)]
        super().__init__(name, [as_tensor(each.initial, "", "") for each in own], writes)

    def perform(self, values: list[Any]) -> None:
        kept = [variable.value for variable in self._saved]
        for variable, value in zip(self.writes, [*values, *kept], strict=True):
            variable.assign(ops.cast(value, variable.dtype))


def _initial_values(optimizer: Any) -> list[tuple[Any, Any]]:
    """The variables of an optimizer except its learning rate, with their initial values."""
    inner = innermost(optimizer)
    other = type(inner).from_config(inner.get_config())
    other.build(inner._trainable_variables)
    pairs = zip(inner.variables, other.variables, strict=True)
    return [(mine, its.value) for mine, its in pairs if mine is not inner._learning_rate]


def global_variables_initializer(name: str | None = None) -> Operation:
    """Makes an operation that sets all variables of the default graph to their initial values.

    Random initial values of a `Variable` are drawn again; optimizers in the graph are reset;
    weights of layers get the values that they had when this operation was made.

    Example:
        >>> from trainstep import graph
        >>> with graph.Graph().as_default():
        ...     w, session = graph.Variable(1.0), graph.Session()
        ...     w.load(5.0)
        ...     session.run(graph.global_variables_initializer())
        ...     float(session.run(w))
        1.0
    """
    return _Initialize(name)
