"""PyTorch: a recorded step made into the part of it that one process computes.

The record is of the whole batch: forward, backward and optimizer, as plain operations with sizes
that are known. Each value is either whole, the same in every process, or cut along one axis, of
which a process has its own rows. An operation that treats rows one by one keeps them cut; a sum
over them becomes a sum of sums. What has no rule gets whole values: right for every operation, if
not cheap. So what the step computes is that of the whole batch, whatever it is made of.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from trainstep._engines._base import Tensor
from trainstep._engines._cuts import Cut
from trainstep._engines._torch_collectives import gather, sum_all
from trainstep._engines._torch_state import memory
from trainstep._errors import StrategyError

aten: Any = torch.ops.aten


class Rows(NamedTuple):
    """The rows of a batch, and those of this process."""

    total: int
    start: int
    stop: int

    @property
    def own(self) -> int:
        """How many are this process's."""
        return self.stop - self.start


class Value:
    """What a node of the record has become.

    Attributes:
        node: The new node; of several results, the node of all of them.
        cut: How it is cut; None if it is whole. A list for several results.
        partial: Whether the sum over all processes is still to be made. A list for several.
        is_moved: Whether it lies in other memory than its views do.
    """

    def __init__(self, node: Any, cut: Any = None, partial: Any = False) -> None:
        self.node, self.cut, self.partial = node, cut, partial
        self.is_moved = False


def partitioned(
    module: Any, inputs: Sequence[Tensor], batch: Sequence[bool], rows: Rows
) -> fx.GraphModule:
    """The part of a step that this process computes.

    Args:
        module: The record.
        inputs: What it was recorded with.
        batch: Which of the inputs are rows of the batch; the part takes those of this process.
        rows: The rows.
    """
    shapes = _Shapes(module)
    with torch.no_grad():
        shapes.run(*inputs)
    return Partition(module, shapes, batch, rows).made()


class _Shapes(fx.Interpreter):  # type: ignore[misc]
    """Runs a record, and notes the shape of every value."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.found: dict[Any, Any] = {}
        self.memory: dict[Any, int] = {}
        self._held: list[Any] = []  # so that no memory is used twice

    def run_node(self, n: Any) -> Any:
        result = super().run_node(n)
        is_tensor = isinstance(result, torch.Tensor)
        self.found[n] = tuple(result.shape) if is_tensor else None
        if is_tensor:
            self.memory[n] = memory(result)
            self._held.append(result)
        return result


class Partition:
    """Goes through a record once, and writes the part."""

    def __init__(self, module: Any, shapes: _Shapes, batch: Sequence[bool], rows: Rows) -> None:
        self._module, self._batch, self.rows = module, batch, rows
        self.shapes, self._memory = shapes.found, shapes.memory
        self._place = {node: place for place, node in enumerate(module.graph.nodes)}
        self.graph = fx.Graph()
        self.values: dict[Any, Value] = {}
        self._pending: list[Value] = []

    def made(self) -> fx.GraphModule:
        """The part, as a module."""
        from trainstep._engines._torch_rules import moved, rule_of

        batch = iter(self._batch)
        for node in self._module.graph.nodes:
            if node.op == "placeholder":
                new = Value(self.graph.placeholder(node.target))
                if next(batch):
                    new.cut = Cut(0)
                    if self.rows.total == 1:  # no axis of size 1 is broadcast by mistake
                        new = Value(self.whole(new, self.shapes[node]))
                self.values[node] = new
            elif node.op == "get_attr":
                self.values[node] = Value(self.graph.get_attr(node.target))
            elif node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], self.whole_of))
            elif node.target is operator.getitem:
                self.values[node] = self._item(node)
            else:
                self._check_written(node)
                found = moved(self, node)
                if found is None and any(self.settled(n).cut for n in node.all_input_nodes):
                    found = rule_of(node.target)(self, node)
                self.values[node] = found if found is not None else self.unknown(node)
        self.graph.eliminate_dead_code()
        return fx.GraphModule(self._module, self.graph)

    def _check_written(self, node: Any) -> None:
        """Refuses an update in place of what has views, if they are no longer in one memory."""
        from trainstep._engines._torch_rules import rule_of, unknown

        for written in _written(node):
            same = [n for n in self.values if self._memory.get(n) == self._memory.get(written)]
            later = [n for n in same if any(self._place[u] > self._place[node] for u in n.users)]
            views = [n for n in later if n is not written and n.target is not node.target]
            apart = any(self.values[n].is_moved or self.values[n].partial for n in same)
            gathers = rule_of(node.target) is unknown and any(self.values[n].cut for n in same)
            if views and (apart or gathers):
                raise StrategyError(
                    "the step cannot be shared out over processes.\n"
                    "  expected: no tensor of rows that is updated in place while a view of it is "
                    "used\n"
                    f"  came:     {node.target}\n"
                    "  to fix:   compute a new tensor instead"
                )

    # What rules use ---------------------------------------------------------------------------

    def shape(self, node: Any) -> tuple[int, ...]:
        """The shape of a value of the record."""
        return self.shapes[node]  # type: ignore[no-any-return]

    def cut_of(self, node: Any) -> Cut | None:
        """How a value is cut."""
        return self.values[node].cut if isinstance(node, fx.Node) else None

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Writes an operation."""
        return self.graph.call_function(target, args, kwargs)

    def local(self, cut: Cut) -> int:
        """How long a cut axis is in this process."""
        return self.rows.own * cut.unit

    def unknown(self, node: Any) -> Value:
        """An operation on whole values."""
        args = fx.map_arg(node.args, self.whole_of)
        kwargs = fx.map_arg(node.kwargs, self.whole_of)
        return Value(self.graph.call_function(node.target, args, kwargs))

    def whole_of(self, node: Any) -> Any:
        """The whole of a value."""
        return self.whole(self.values[node], self.shapes[node])

    def whole(self, value: Value, shape: Any) -> Any:
        """The same; rows of other processes are fetched, once."""
        self._settle(value)
        if value.cut is not None:
            axis, unit = value.cut
            start = self.rows.start * unit
            value.node = self.call(gather, value.node, axis, start, shape[axis])
            value.cut, value.is_moved = None, True
        return value.node

    def settled(self, node: Any) -> Value:
        """A value whose sum has been made."""
        value = self.values[node]
        self._settle(value)
        return value

    def cut(self, node: Any, cut: Cut) -> Any:
        """A value cut like this; one with nothing along the axis as it is."""
        value, shape = self.settled(node), self.shapes[node]
        if value.cut == cut:
            return value.node
        if value.cut is not None:
            self.whole(value, shape)
        if cut.axis < 0 or shape[cut.axis] == 1:
            return value.node
        start, stop = self.rows.start * cut.unit, self.rows.stop * cut.unit
        return self.call(aten.slice.Tensor, value.node, cut.axis, start, stop)

    def summed(self, node: Any, before: Value | None = None) -> Value:
        """A sum over the rows of this process, to be added to those of the others.

        Args:
            node: The sum.
            before: The same numbers, laid out otherwise, that nothing else may need.
        """
        value = Value(node, partial=True)
        self._pending.append(value)
        if before in self._pending:
            self._pending.remove(before)
        return value

    def _settle(self, value: Value) -> None:
        """Makes all sums that are due, in one message, if this is one of them."""
        if value.partial is not True:
            return
        pending, self._pending = self._pending, []
        if value not in pending:
            pending.append(value)
        sums = self.call(sum_all, [each.node for each in pending])
        for place, each in enumerate(pending):
            each.node, each.partial = self.call(operator.getitem, sums, place), False
            each.is_moved = True

    def _item(self, node: Any) -> Value:
        value, place = self.values[node.args[0]], node.args[1]
        item = self.call(operator.getitem, value.node, place)
        if not isinstance(value.cut, list) or self.shapes[node] is None:
            return Value(item)
        if value.partial[place]:
            return self.summed(item)
        return Value(item, value.cut[place])


def _written(node: Any) -> list[Any]:
    """The values that an operation writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    places = [i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]
    given = [node.args[place] for place in places if place < len(node.args)]
    flat = [each for one in given for each in (one if isinstance(one, (list, tuple)) else [one])]
    return [each for each in flat if isinstance(each, fx.Node)]


Rule = Callable[[Partition, Any], Value | None]
