"""`Plan`: the step of a set of fetches, as a function of its feeds.

fetches -> tensors and operations -> nodes that they need -> feeds in use, order of computation
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Sequence
from typing import Any

import keras
from keras import ops

from trainstep._common.errors import ArgumentError
from trainstep._state import scopes
from trainstep.graph._evaluate import Computation, Gradients, Values, fed_on_path
from trainstep.graph._feeds import by_name, inside_body_error
from trainstep.graph._graph import Graph
from trainstep.graph._operations import Operation
from trainstep.graph._run_order import steps_of
from trainstep.graph._tensors import NodeOperation, describe, label, node_of
from trainstep.graph._traverse import needed, sources_of
from trainstep.graph._variables import read

_SEED = "seed_generator_state"  # Keras's name for the RNG state of a generator


class Plan:
    """The step of a set of fetches.

    Args:
        graph: The graph of the session.
        fetches: Tensors and operations.
        fed: The tensors of the feeds.

    Attributes:
        fed: The tensors of the feeds that the fetches need.
        placement: The id of the block of each node in the plan.
    """

    def __init__(self, graph: Graph, fetches: Sequence[Any], fed: Sequence[Any]) -> None:
        self.fetches = list(fetches)
        self.tensors = [each for each in fetches if isinstance(each, keras.KerasTensor)]
        given = {id(tensor) for tensor in fed}
        self._block_of = graph.block_of
        self.steps = steps_of(graph, fetches, given)
        wanted = [*self.tensors, *(t for step in self.steps for t in step.inputs)]
        wanted += [
            tensor
            for node in needed(wanted, given)
            if isinstance(node.operation, Gradients)
            for fed_one in fed_on_path(node.operation, given)
            for tensor in node_of(fed_one).input_tensors
        ]
        sources = sources_of(wanted, given)
        _check_graph(graph, fetches, sources)
        _check_fed(sources)
        _check_outside(graph, needed(wanted, given), self.steps)
        used = {id(t) for node in needed(wanted, given) for t in node.input_tensors}
        used |= {id(t) for t in wanted}
        self.fed = [tensor for tensor in fed if id(tensor) in used]
        self._given = given & used
        # An open block adds its nodes to `block_of` when it ends: until then, the same fetches are
        # another step.
        self.placement = tuple(id(graph.block_of.get(node)) for node in needed(wanted, given))
        self._late = self._find_late(wanted)
        self._early = self._find_early()
        self.__name__ = f"run({', '.join(map(label, fetches))})"
        self.__signature__ = inspect.Signature(_parameters(self.fed))

    def __call__(self, *values: Any) -> list[Any]:
        """Runs inside a step, and returns the values of the fetched tensors."""
        if self.steps or scopes.recording() is None:  # None: inside another library's trace
            return self._run(values)
        # Without operations, only the RNG state may change: other writes (batch normalization, a
        # function in `graph.call`) are dropped.
        branch, found = scopes.run_isolated(lambda: self._run(values))
        scope = scopes.current_scope()
        for variable in branch.writes.values():
            if variable.name == _SEED:
                scope.add_update((variable, branch.state_mapping[id(variable)]))
        result: list[Any] = found
        return result

    def _run(self, given: Sequence[Any]) -> list[Any]:
        fed = dict(zip(map(id, self.fed), given, strict=True))
        before: Values = dict(fed)
        computation = Computation(fed)
        computation.add(self._early, before)
        if self.steps:
            _unalias(self._early, before)
        blocks: dict[Any, Values] = {}
        computation = computation.after(self._early)
        for step in self.steps:
            here = before
            if step.block is not None:
                own = blocks.setdefault(step.block, {})
                here = {**self._without_reads(before, fed), **own}
            computation.add(step.inputs, here)
            found = [here[id(tensor)] for tensor in step.inputs]
            if step.block is not None:
                own.update(self._written_in(step, here))
            if isinstance(step, Operation):
                step.perform(found)
            else:
                before.update(zip(map(id, step.inputs), found, strict=True))
                _unalias(step.inputs, before)
        computation.add([t for t in self.tensors if id(t) in self._late], before)
        return [ops.convert_to_tensor(before[id(tensor)]) for tensor in self.tensors]

    def _written_in(self, step: Any, values: Values) -> Values:
        """The values of tensors in the block of a step; stored, so each is computed once."""
        nodes = needed(step.inputs, self._given)
        own = [t for n in nodes if self._block_of.get(n) is step.block for t in n.outputs]
        return {id(t): values[id(t)] for t in own if id(t) in values}

    def _without_reads(self, values: Values, fed: Collection[int]) -> Values:
        """The values without those of variables, which are then read again after the updates."""
        reads = {
            id(output)
            for node in needed(self._early, fed)
            if getattr(node.operation, "is_reread", False)
            for output in node.outputs
        }
        return {key: value for key, value in values.items() if key not in reads}

    def _find_late(self, wanted: Sequence[Any]) -> set[int]:
        """The ids of tensors that were built in blocks, and of tensors that depend on them."""
        late: set[int] = set()
        for node in needed(wanted, self._given):
            if self._block_of.get(node) is not None or any(
                id(t) in late for t in node.input_tensors
            ):
                late |= {id(t) for t in node.outputs}
        return late

    def _find_early(self) -> list[Any]:
        """The tensors to compute first, from the state before all updates."""
        found = {id(t): t for t in self.tensors if id(t) not in self._late}
        seen: set[tuple[int, bool]] = set()
        todo = [(t, step.block is not None) for step in self.steps for t in step.inputs]
        while todo:
            tensor, in_block = todo.pop()
            node = node_of(tensor)
            if id(tensor) in self._given or node is None or (id(tensor), in_block) in seen:
                continue
            seen.add((id(tensor), in_block))
            if id(tensor) in self._late:
                todo += [(each, in_block) for each in node.input_tensors]
            elif not (in_block and getattr(node.operation, "is_reread", False)):
                found[id(tensor)] = tensor
        return list(found.values())

    def uses(self) -> list[Any]:
        """The objects that run user code: layers, functions, optimizers."""
        tensors = [*self.tensors, *(t for step in self.steps for t in step.inputs)]
        found: list[Any] = []
        for node in needed(tensors, self._given):
            own = node.operation
            found += own.uses() if isinstance(own, NodeOperation) else [own]
        return [*found, *(each for step in self.steps for each in step.uses())]


def _unalias(tensors: Sequence[Any], values: Values) -> None:
    """Copies values that an in-place update (on torch) would overwrite."""
    around = scopes.recording()
    for tensor in tensors:
        if around is not None and not getattr(node_of(tensor).operation, "is_unaliased", False):
            values[id(tensor)] = around.shielded(values[id(tensor)])


def _parameters(tensors: Sequence[Any]) -> list[inspect.Parameter]:
    names: list[str] = []
    for tensor in tensors:
        name = re.sub(r"\W", "_", label(tensor))
        name = name if name.isidentifier() else f"_{name}"
        names.append(name if name not in names else f"{name}_{len(names)}")
    return [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]


def resolve(graph: Graph, fetch: Any) -> Any:
    """Returns the tensor or operation of a fetch."""
    if isinstance(fetch, str):
        found = by_name(graph, fetch)
        if found is None:
            raise graph.unknown_name_error(fetch, "fetches")
        return found
    if isinstance(fetch, keras.Variable):
        with graph.as_default():
            return read(fetch)
    if isinstance(fetch, (keras.KerasTensor, Operation)):
        return fetch
    raise ArgumentError(
        "Session.run",
        "fetches",
        "tensors, variables, operations or names, in any structure",
        "None" if fetch is None else f"a {type(fetch).__name__}",
        "fetch results of `graph` and `keras.ops`",
    )


def _check_graph(graph: Graph, fetches: Sequence[Any], sources: Sequence[Any]) -> None:
    others = [each for each in sources if getattr(each, "graph", None) is not graph]
    others += [f for f in fetches if isinstance(f, Operation) and f.graph is not graph]
    if others:
        made = hasattr(others[0], "graph")
        raise ArgumentError(
            "Session.run",
            "fetches",
            "tensors and operations of the session's own graph",
            f"{describe(others[0])}, of {'another graph' if made else 'no graph'}",
            "make the session with `Session(graph=...)` for the graph of the tensor"
            if made
            else "use `graph.placeholder` instead of `keras.Input`",
        )


def _check_outside(graph: Graph, nodes: Sequence[Any], steps: Sequence[Any]) -> None:
    inner = next((each for each in (*steps, *nodes) if each in graph.body_owner), None)
    if inner is not None:
        value = inner if isinstance(inner, Operation) else inner.outputs[0]
        raise inside_body_error("fetches", value, graph.body_owner[inner])


def _check_fed(sources: Sequence[Any]) -> None:
    missing = [each for each in sources if each._keras_history.operation.is_fed]
    if missing:
        names = ", ".join(map(describe, missing))
        raise ArgumentError(
            "Session.run",
            "feed_dict",
            f"a value for each placeholder that the fetches need: {names}",
            "no value",
            f"add it: `feed_dict={{{missing[0].name}: ...}}`, or to the `feed_list` of a callable",
        )
