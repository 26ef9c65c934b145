"""Graphs: the names and the sources of what is built, and the block that is being written.

A tensor belongs to the graph of the placeholders, variables and constants that it is made of. Keras
itself links them: from a source one comes forward to everything that was made of it.
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
    """A name without the number of an output."""
    return name.removesuffix(_NUMBERED)


class Block:
    """What is written inside a `control_dependencies`.

    Args:
        after: The operations that come first.
        outer: The block around it.
        begin: The number of its beginning among operations.
    """

    def __init__(self, after: Sequence[Any], outer: Block | None, begin: int) -> None:
        self.after: list[Any] = [*(outer.after if outer else ()), *after]
        self.begin = begin


class Graph:
    """A graph: what was built while it was the default one.

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
        self.reads: dict[int, Any] = {}  # tensors of Keras variables that others made
        self.blocks = _Blocks()
        # The block that a node was written in; None if it was shielded from the blocks around it.
        self.placed: dict[Any, Block | None] = {}
        # Nodes and operations of a branch or a loop, and which function they were written in.
        self.inside: dict[Any, str] = {}
        self.revision = 0  # of the two tables above: a session plans anew when it has changed
        self.keras_names: dict[str, Any] = {}  # tensors found by the name of a Keras layer
        self._names: dict[str, Any] = {}
        self._lock = threading.Lock()
        self.count = 0  # of operations and blocks so far

    @contextlib.contextmanager
    def as_default(self) -> Iterator[Graph]:
        """Everything that is built inside belongs to this graph."""
        stack = _stack()
        stack.append(self)
        try:
            yield self
        finally:
            stack.pop()

    def add(self, named: Any, name: str | None, kind: str) -> str:
        """Enters a tensor or an operation under a name of its own, which is returned."""
        with self._lock:
            wanted, number = name or kind, 0
            found = wanted
            while found in self._names:
                number += 1
                found = f"{wanted}_{number}"
            self._names[found] = named
        return found

    def next_index(self) -> int:
        """A number for an operation: they run in the order in which they were made."""
        with self._lock:
            self.count += 1
            return self.count

    def find(self, name: str) -> Any:
        """The tensor or operation of a name; None if there is none."""
        found = self._names.get(name)
        return self._names.get(plain_name(name)) if found is None else found

    def unknown(self, name: str, argument: str) -> ArgumentError:
        """The error for a name that is not there."""
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
        """All names."""
        return list(self._names)


class _Blocks(threading.local):
    """The innermost block of a graph that a thread is writing."""

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
    """The graph to which everything is added that is built now.

    Example:
        >>> from trainstep import graph
        >>> isinstance(graph.get_default_graph(), graph.Graph)
        True
    """
    return _local.graphs[-1] if _local.graphs else _default[0]


def reset_default_graph() -> None:
    """Begins a new default graph; what was built stays usable with a session of its own graph.

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
            "call it outside; inside, make another `Graph`",
        )
    _default[0] = Graph()
