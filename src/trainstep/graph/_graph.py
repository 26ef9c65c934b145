"""`Graph`: names, source tensors, operations, and the current `control_dependencies` block.

A tensor belongs to the graph of the placeholders, variables and constants that it depends on. The
graph stores only those sources: Keras links every tensor to the nodes that use it.
"""

from __future__ import annotations

import contextlib
import difflib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from trainstep._common.errors import ArgumentError

_NUMBERED = ":0"  # TensorFlow 1 wrote "loss:0" for the first output of "loss"


def plain_name(name: str) -> str:
    """Removes the output number from a name."""
    return name.removesuffix(_NUMBERED)


class Block:
    """A `control_dependencies` block.

    Args:
        after: The operations that run before the block.
        outer: The enclosing block.
        begin: The index of the start of the block, among the indices of operations.
    """

    def __init__(self, after: Sequence[Any], outer: Block | None, begin: int) -> None:
        self.after: list[Any] = [*(outer.after if outer else ()), *after]
        self.begin = begin


class Graph:
    """A graph: the tensors and operations that were built while it was the default graph.

    Example:
        >>> from trainstep import graph
        >>> with graph.Graph().as_default() as g:
        ...     x = graph.placeholder("float32", [None, 2], name="x")
        >>> g.find("x") is x
        True
    """

    def __init__(self) -> None:
        self.sources: list[Any] = []
        self.optimizers: list[Any] = []
        self.operations: list[Any] = []
        self.reads: dict[int, Any] = {}  # the `Variable` of each Keras variable, by id
        self.blocks = _Blocks()
        # The block of a node; None: `control_dependencies(None)` exempts it from outer blocks.
        self.block_of: dict[Any, Block | None] = {}
        # Nodes and operations of a branch or a loop: "graph.cond" or "graph.while_loop".
        self.body_owner: dict[Any, str] = {}
        self.revision = 0  # of the two tables above; a session plans again when it changes
        self.keras_names: dict[str, Any] = {}  # tensors found by the name of a Keras layer
        self._names: dict[str, Any] = {}
        self._lock = threading.Lock()
        self.count = 0  # the number of operations and blocks so far

    @contextlib.contextmanager
    def as_default(self) -> Iterator[Graph]:
        """Makes this the default graph inside a `with` block."""
        stack = _stack()
        stack.append(self)
        try:
            yield self
        finally:
            stack.pop()

    def add(self, named: Any, name: str | None, kind: str) -> str:
        """Registers a tensor or an operation, and returns its unique name."""
        with self._lock:
            wanted, number = name or kind, 0
            found = wanted
            while found in self._names:
                number += 1
                found = f"{wanted}_{number}"
            self._names[found] = named
        return found

    def next_index(self) -> int:
        """Returns the index of a new operation; operations run in this order."""
        with self._lock:
            self.count += 1
            return self.count

    def find(self, name: str) -> Any:
        """Returns the tensor or operation of a name, or None."""
        found = self._names.get(name)
        return self._names.get(plain_name(name)) if found is None else found

    def unknown_name_error(self, name: str, argument: str) -> ArgumentError:
        """Returns the error for an unknown name."""
        close = difflib.get_close_matches(name, self.names, n=3, cutoff=0.5)
        return ArgumentError(
            "Session.run",
            argument,
            "a name in the graph",
            repr(name),
            f"did you mean {' or '.join(map(repr, close))}?"
            if close
            else "name a tensor with `graph.identity(tensor, name=...)`",
        )

    @property
    def names(self) -> list[str]:
        """The names of all tensors and operations."""
        return list(self._names)


class _Blocks(threading.local):
    """The innermost open block of a graph, for each thread."""

    def __init__(self) -> None:
        self.current: Block | None = None


class _Local(threading.local):
    def __init__(self) -> None:
        self.graphs: list[Graph] = []


_local = _Local()
_default = [Graph()]


def _stack() -> list[Graph]:
    return _local.graphs


def get_default_graph() -> Graph:
    """Returns the graph that new tensors and operations are added to.

    Example:
        >>> from trainstep import graph
        >>> isinstance(graph.get_default_graph(), graph.Graph)
        True
    """
    return _local.graphs[-1] if _local.graphs else _default[0]


def reset_default_graph() -> None:
    """Starts a new default graph; sessions of the old graph keep working.

    Example:
        >>> from trainstep import graph
        >>> graph.reset_default_graph()
        >>> graph.get_default_graph().names
        []
    """
    if _local.graphs:
        raise ArgumentError(
            "graph.reset_default_graph",
            "graph",
            "no `with Graph().as_default()` around the call",
            "a call inside one",
            "call it outside the block, or make another `Graph`",
        )
    _default[0] = Graph()
