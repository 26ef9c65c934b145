"""Variables: tensors that read a Keras variable, and the variables of a graph."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from trainstep._common.errors import ArgumentError
from trainstep._explain.signature import array_text
from trainstep.graph._evaluate import computed
from trainstep.graph._graph import Graph, get_default_graph
from trainstep.graph._sources import Read, fixed, numbers
from trainstep.graph._tensors import Tensor, describe
from trainstep.graph._traverse import needed, nodes_from, sources_of, variables_in


class Variable(Tensor):
    """A variable of the graph: a symbolic tensor that reads a Keras variable at every run.

    It has its initial value at once. `global_variables_initializer` sets it again.

    Args:
        initial_value: A number, an array, or a tensor of the graph that needs no feeding, such as
            `random_normal(...)`.
        trainable: Whether it is one of `trainable_variables()`; what is no float never is.
        name: Its name.
        dtype: Its dtype; that of the initial value by default.

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
    initial: Any  # an array, or a tensor to draw it anew from; None: somebody else made it

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
            initial_value = computed([value])[0]
        kind = None if dtype is None else str(keras.backend.standardize_dtype(dtype))
        array = numbers(initial_value, kind, "graph.Variable", "initial_value")
        trainable = trainable and "float" in str(array.dtype)
        variable = keras.Variable(array, dtype=str(array.dtype), trainable=trainable, name=name)
        self._begin(variable, name)
        # One that is made of other variables is what it was when they had their first values.
        anew = isinstance(value, keras.KerasTensor) and not variables_under([value])
        self.initial = value if anew else array

    @classmethod
    def of(cls, variable: Any) -> Variable:
        """The tensor that reads a Keras variable that is there already."""
        made = cls.__new__(cls)
        made._begin(variable, variable.path)
        made.initial = None
        return made

    def _begin(self, variable: Any, name: str | None) -> None:
        super().__init__(tuple(variable.shape), variable.dtype)
        self.variable = variable
        self.graph = get_default_graph()
        self.name = self.graph.add(self, name, "variable")
        self.is_named = True
        Read(variable).own(self)
        self.graph.sources.append(self)
        self.graph.reads[id(variable)] = self

    @property
    def path(self) -> str:
        """The path of the Keras variable: of a weight, its layer and its name."""
        return str(self.variable.path)

    @property
    def trainable(self) -> bool:
        """Whether it is one of `trainable_variables()`."""
        return bool(self.variable.trainable)

    def numpy(self) -> Any:
        """Its value now."""
        return ops.convert_to_numpy(self.variable.value)

    def load(self, value: Any) -> None:
        """Sets it now, without a run."""
        array = numbers(value, self.dtype, "Variable.load", "value")
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
        """An operation that sets it; see `graph.assign`."""
        from trainstep.graph._operations import assign

        return assign(self, value, name)

    def assign_add(self, value: Any, name: str | None = None) -> Any:
        """An operation that adds to it."""
        from trainstep.graph._operations import assign_add

        return assign_add(self, value, name)

    def assign_sub(self, value: Any, name: str | None = None) -> Any:
        """An operation that subtracts from it."""
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
            "a value, or a tensor that needs no feeding",
            f"a tensor of placeholder `{fed[0].name}`",
            "begin with a constant, and fetch an `assign` of that tensor",
        )


def read(variable: Any) -> Variable:
    """The tensor that reads an existing Keras variable, such as a layer's weight.

    Keras computes with variables at once, so an expression of them alone would be a constant of
    the graph. With this, it is computed at every run.

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
            "pass a weight of a layer, `layer.kernel` say",
        )  # fmt: skip
    known = get_default_graph().reads.get(id(variable))
    return Variable.of(variable) if known is None else known


def as_tensor(value: Any, function: str, argument: str, dtype: str | None = None) -> Any:
    """A symbolic tensor of a tensor, a variable or a value, which gets the dtype."""
    if isinstance(value, keras.KerasTensor):
        return value
    if isinstance(value, keras.Variable):
        return read(value)
    return fixed(numbers(value, dtype, function, argument))


def variable_of(value: Any, function: str, argument: str) -> Any:
    """The Keras variable of a variable of either kind."""
    found = value.variable if isinstance(value, Variable) else value
    if not isinstance(found, keras.Variable):
        raise ArgumentError(
            function,
            argument,
            "a graph.Variable or a keras.Variable",
            f"a {type(value).__name__}",
            "make it with `graph.Variable(...)`, or pass a weight of a layer",
        )
    return found


def global_variables() -> list[Variable]:
    """All variables of the default graph: own ones, and weights of layers in it.

    They are tensors, also those of layers: what is made of them is computed at every run.

    Example:
        >>> from trainstep import graph
        >>> with graph.Graph().as_default():
        ...     w = graph.Variable(1.0)
        ...     graph.global_variables() == [w]
        True
    """
    return [read(variable) for variable in variables_of(get_default_graph())]


def trainable_variables() -> list[Variable]:
    """Those that are trainable; see `global_variables`.

    Example:
        >>> from trainstep import graph
        >>> with graph.Graph().as_default():
        ...     w, steps = graph.Variable(1.0), graph.Variable(0, trainable=False)
        ...     graph.trainable_variables() == [w]
        True
    """
    return [read(each) for each in variables_of(get_default_graph()) if each.trainable]


def variables_of(graph: Graph) -> list[Any]:
    """The Keras variables of a graph."""
    own = [source.variable for source in graph.sources if isinstance(source, Variable)]
    layers = [v for node in nodes_from(graph.sources) for v in variables_in(node)]
    return list({id(v): v for v in (*own, *layers)}.values())


def variables_under(tensors: list[Any]) -> list[Any]:
    """The variables that tensors depend on, in the order of their use."""
    found = [variable for node in needed(tensors) for variable in variables_in(node)]
    return list({id(variable): variable for variable in found}.values())
