"""`Variable`: a tensor that reads a Keras variable; and the lists of a graph's variables."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from trainstep._common.errors import ArgumentError
from trainstep._explain.signature import array_text
from trainstep.graph._evaluate import evaluate
from trainstep.graph._graph import Graph, get_default_graph
from trainstep.graph._sources import Read, checked_array, constant_from_array
from trainstep.graph._tensors import Tensor, describe
from trainstep.graph._traverse import needed, nodes_from, sources_of, variables_in


class Variable(Tensor):
    """A variable of the graph: a symbolic tensor that reads a Keras variable at every run.

    The constructor sets its initial value, and `global_variables_initializer` sets it again.

    Args:
        initial_value: A number, an array, or a tensor of the graph that needs no feeds, such as
            `random_normal(...)`.
        trainable: Whether it is in `trainable_variables()`; only floats can be.
        name: Its name.
        dtype: Its dtype; by default, that of the initial value.

    Attributes:
        variable: The Keras variable.

    Example:
        >>> from trainstep import graph
        >>> w = graph.Variable([1.0, 2.0], name="w")
        >>> session = graph.Session()
        >>> session.run(w.assign_add([1.0, 1.0]))
        >>> session.run(w * w).tolist()
        [4.0, 9.0]
    """

    variable: Any
    initial: Any  # an array, or a tensor to evaluate; None: a layer owns the Keras variable

    def __init__(
        self,
        initial_value: Any,
        trainable: bool = True,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        value = initial_value
        if isinstance(value, keras.KerasTensor):
            _check_unfed(value)
            initial_value = evaluate([value])[0]
        kind = None if dtype is None else str(keras.backend.standardize_dtype(dtype))
        array = checked_array(initial_value, kind, "graph.Variable", "initial_value")
        trainable = trainable and "float" in str(array.dtype)
        variable = keras.Variable(array, dtype=str(array.dtype), trainable=trainable, name=name)
        self._register(variable, name)
        # A tensor of other variables is evaluated only now: the initializer sets those variables in
        # the same run, and would read them from before it.
        reevaluate = isinstance(value, keras.KerasTensor) and not variables_under([value])
        self.initial = value if reevaluate else array

    @classmethod
    def of(cls, variable: Any) -> Variable:
        """Makes the tensor that reads an existing Keras variable."""
        made = cls.__new__(cls)
        made._register(variable, variable.path)
        made.initial = None
        return made

    def _register(self, variable: Any, name: str | None) -> None:
        super().__init__(tuple(variable.shape), variable.dtype)
        self.variable = variable
        self.graph = get_default_graph()
        self.name = self.graph.add(self, name, "variable")
        self.is_named = True
        Read(variable).set_outputs(self)
        self.graph.sources.append(self)
        self.graph.reads[id(variable)] = self

    @property
    def path(self) -> str:
        """The path of the Keras variable; for a weight, its layer and its name."""
        return str(self.variable.path)

    @property
    def trainable(self) -> bool:
        """Whether it is in `trainable_variables()`."""
        return bool(self.variable.trainable)

    def numpy(self) -> Any:
        """Returns its current value."""
        return ops.convert_to_numpy(self.variable.value)

    def load(self, value: Any) -> None:
        """Sets its value immediately, without a run."""
        array = checked_array(value, self.dtype, "Variable.load", "value")
        if tuple(array.shape) != tuple(self.shape):
            raise ArgumentError(
                "Variable.load",
                "value",
                f"the shape of {describe(self)}",
                array_text(tuple(array.shape), str(array.dtype)),
                "reshape it",
            )
        self.variable.assign(array)

    def assign(self, value: Any, name: str | None = None) -> Any:
        """Makes an operation that sets it; see `graph.assign`."""
        from trainstep.graph._operations import assign

        return assign(self, value, name)

    def assign_add(self, value: Any, name: str | None = None) -> Any:
        """Makes an operation that adds to it."""
        from trainstep.graph._operations import assign_add

        return assign_add(self, value, name)

    def assign_sub(self, value: Any, name: str | None = None) -> Any:
        """Makes an operation that subtracts from it."""
        from trainstep.graph._operations import assign_sub

        return assign_sub(self, value, name)

    def __repr__(self) -> str:
        return f"<graph.Variable {self.name} {self.dtype}{list(self.shape)}>"


def _check_unfed(value: Any) -> None:
    fed = [source for source in sources_of([value]) if source._keras_history.operation.is_fed]
    if fed:
        raise ArgumentError(
            "graph.Variable",
            "initial_value",
            "a value, or a tensor that needs no feeds",
            f"a tensor that depends on placeholder `{fed[0].name}`",
            "start from a constant, and fetch an `assign` of that tensor",
        )


def read(variable: Any) -> Variable:
    """Returns the tensor that reads an existing Keras variable, such as a layer's weight.

    Keras evaluates expressions of Keras variables immediately, so they would be constants of the
    graph. An expression of this tensor is computed at every run.

    Example:
        >>> import keras
        >>> from trainstep import graph
        >>> layer = keras.layers.Dense(1, kernel_initializer="ones")
        >>> out = layer(graph.placeholder("float32", [None, 3]))
        >>> float(graph.Session().run(keras.ops.sum(graph.read(layer.kernel) ** 2)))
        3.0
    """
    if isinstance(variable, Variable):
        return variable
    if not isinstance(variable, keras.Variable):
        raise ArgumentError(
            "graph.read", "variable", "a keras.Variable", f"a {type(variable).__name__}",
            "pass a weight of a layer, for example `layer.kernel`",
        )  # fmt: skip
    known = get_default_graph().reads.get(id(variable))
    return Variable.of(variable) if known is None else known


def as_tensor(value: Any, function: str, argument: str, dtype: str | None = None) -> Any:
    """Converts a tensor, a variable or a value (which gets the dtype) to a symbolic tensor."""
    if isinstance(value, keras.KerasTensor):
        return value
    if isinstance(value, keras.Variable):
        return read(value)
    return constant_from_array(checked_array(value, dtype, function, argument))


def variable_of(value: Any, function: str, argument: str) -> Any:
    """Returns the Keras variable of a `graph.Variable` or a `keras.Variable`."""
    found = value.variable if isinstance(value, Variable) else value
    if not isinstance(found, keras.Variable):
        raise ArgumentError(
            function,
            argument,
            "a graph.Variable or a keras.Variable",
            f"a {type(value).__name__}",
            "make a `graph.Variable(...)`, or pass a weight of a layer",
        )
    return found


def global_variables() -> list[Variable]:
    """Returns all variables of the default graph, including the weights of its layers.

    All of them are tensors: every run computes the expressions that use them.

    Example:
        >>> from trainstep import graph
        >>> with graph.Graph().as_default():
        ...     w = graph.Variable(1.0)
        ...     graph.global_variables() == [w]
        True
    """
    return [read(variable) for variable in variables_of(get_default_graph())]


def trainable_variables() -> list[Variable]:
    """Returns the trainable variables of the default graph; see `global_variables`.

    Example:
        >>> from trainstep import graph
        >>> with graph.Graph().as_default():
        ...     w, steps = graph.Variable(1.0), graph.Variable(0, trainable=False)
        ...     graph.trainable_variables() == [w]
        True
    """
    return [read(each) for each in variables_of(get_default_graph()) if each.trainable]


def variables_of(graph: Graph) -> list[Any]:
    """Returns the Keras variables of a graph."""
    own = [source.variable for source in graph.sources if isinstance(source, Variable)]
    layers = [v for node in nodes_from(graph.sources) for v in variables_in(node)]
    return list({id(v): v for v in (*own, *layers)}.values())


def variables_under(tensors: list[Any]) -> list[Any]:
    """Returns the Keras variables that tensors depend on, in order of use."""
    found = [variable for node in needed(tensors) for variable in variables_in(node)]
    return list({id(variable): variable for variable in found}.values())
