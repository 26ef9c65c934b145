"""PyTorch: partitions a recorded step; the part computes the rows of one process.

The step is recorded for the whole batch: forward, backward and optimizer, as plain operations.
Dynamic sizes are values in the record, plain numbers at run time. Each value is whole, the same in
every process, or cut along one axis, of which a process has its own rows. The result of an
operation on single rows stays cut; a sum over rows becomes a sum of sums. An operation without a
rule gets whole
values: correct for every operation, but slow. So results are those of the whole batch for any step.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from trainstep._common.errors import StrategyError
from trainstep._engines.contract import Refused
from trainstep._engines.shared.row_cuts import Cut
from trainstep._engines.torch.collectives import gather, sum_all
from trainstep._engines.torch.partition.shapes import Shapes
from trainstep._engines.torch.tricks import forget_source

aten: Any = torch.ops.aten


Size = Any  # an int, or a node that is an int at run time


class Rows(NamedTuple):
    """The rows of a batch, and those of this process."""

    total: Size
    start: Size
    stop: Size


class Value:
    """A node of the record, in the new graph.

    Attributes:
        node: The new node; for several results, the node of all of them.
        cut: The cut; None if it is whole. A list for several results.
        partial: Whether the sum over all processes is pending. A list for several results.
        is_moved: Whether its views no longer alias it.
    """

    def __init__(self, node: Any, cut: Any = None, partial: Any = False) -> None:
        self.node, self.cut, self.partial = node, cut, partial
        self.is_moved = False


def partitioned(
    module: Any, shapes: Shapes, batch: Sequence[bool], rows: Rows | None
) -> fx.GraphModule:
    """Returns the part of a step that this process computes.

    Args:
        module: The record.
        shapes: The shapes of its values.
        batch: Which inputs hold rows of the batch; the part gets the rows of this process.
        rows: The rows; None if their number is dynamic: the fields of `Rows` are then the first
            inputs of the part.
    """
    return Partition(module, shapes, batch, rows).made()


class Partition:
    """Emits the part of a record, in one pass.

    Attributes:
        is_dynamic: Whether the number of rows is dynamic.
    """

    def __init__(
        self, module: Any, shapes: Shapes, batch: Sequence[bool], rows: Rows | None
    ) -> None:
        self._module, self._batch, self.shapes = module, batch, shapes
        self._place = {node: place for place, node in enumerate(module.graph.nodes)}
        self.graph = fx.Graph()
        self.rows = rows or Rows(*(self.graph.placeholder(f"rows_{n}") for n in Rows._fields))
        self.is_dynamic = rows is None
        self._own: Size = None
        self.values: dict[Any, Value] = {}
        self._pending: list[Value] = []
        self._batch_dependent: set[Any] = set()  # nodes that depend on the batch

    def made(self) -> fx.GraphModule:
        """Returns the part, as a module."""
        from trainstep._engines.torch.partition.rules import keep_sum_pending, rule_of

        batch = iter(self._batch)
        for node in self._module.graph.nodes:
            if not self._batch_dependent.isdisjoint(node.all_input_nodes):
                self._batch_dependent.add(node)
            if node.op == "placeholder":
                new = Value(self.graph.placeholder(node.target))
                if next(batch):
                    self._batch_dependent.add(node)
                    new.cut = Cut(0)
                    # A cut axis of size 1 could be broadcast by mistake. Dynamic sizes are larger.
                    if self.rows.total == 1:
                        new = Value(self.whole(new))
                self.values[node] = new
            elif node.op == "get_attr":
                self.values[node] = Value(self.graph.get_attr(node.target))
            elif node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], self.whole_of))
            elif node.target is operator.getitem:
                self.values[node] = self._item(node)
            else:
                self._check_written(node)
                found = keep_sum_pending(self, node)
                if found is None and any(self.settled(n).cut for n in node.all_input_nodes):
                    found = self._checked(node, rule_of(node.target)(self, node))
                self.values[node] = found if found is not None else self.unknown(node)
        self.graph.eliminate_dead_code()
        return forget_source(fx.GraphModule(self._module, self.graph))

    def _checked(self, node: Any, value: Value | None) -> Value | None:
        """Returns the result of a rule; None if its cut does not hold for all sizes."""
        if value is None or value.cut is None:
            return value
        cuts = {node: value.cut}
        if isinstance(value.cut, list):
            items = [user for user in node.users if user.target is operator.getitem]
            cuts = {item: value.cut[item.args[1]] for item in items}
        if all(cut is None or self.shapes.is_cut(each, cut) for each, cut in cuts.items()):
            return value
        if _written(node):
            raise Refused(f"several processes ({node.target} has no rule for such sizes)")
        return None

    def _check_written(self, node: Any) -> None:
        """Refuses an in-place update of a value whose views no longer alias it."""
        from trainstep._engines.torch.partition.rules import rule_of, unknown

        for written in _written(node):
            memory = self.shapes.memory
            same = [n for n in self.values if memory.get(n) == memory.get(written)]
            later = [n for n in same if any(self._place[u] > self._place[node] for u in n.users)]
            views = [n for n in later if n is not written and n.target is not node.target]
            is_separate = any(self.values[n].is_moved or self.values[n].partial for n in same)
            gathers = rule_of(node.target) is unknown and any(self.values[n].cut for n in same)
            if views and (is_separate or gathers):
                raise StrategyError(
                    "the step cannot be split over processes.\n"
                    "  expected: no tensor of rows that is updated in place while a view of it is "
                    "in use\n"
                    f"  got:      {node.target}\n"
                    "  to fix:   compute a new tensor instead"
                )

    # Used by rules ----------------------------------------------------------------------------

    def rank(self, node: Any) -> int:
        """Returns the number of axes of a value of the record."""
        rank = self.shapes.rank(node)
        assert rank is not None
        return rank

    def size(self, node: Any, axis: int) -> Size:
        """Returns the size of an axis of a whole value."""
        known, value = self.shapes.size(node, axis), self.values[node]
        if known is not None:
            return known
        if value.cut is not None and value.cut.axis == axis:
            return self.product(self.rows.total, value.cut.unit)
        return self.call(aten.sym_size.int, value.node, axis)

    def product(self, *sizes: Size) -> Size:
        """Returns the product of sizes."""
        nodes = [size for size in sizes if isinstance(size, fx.Node)]
        known = math.prod(size for size in sizes if not isinstance(size, fx.Node))
        factors = nodes if nodes and known == 1 else [known, *nodes]
        return functools.reduce(functools.partial(self.call, operator.mul), factors)

    def cut_of(self, node: Any) -> Cut | None:
        """Returns the cut of a value."""
        return self.values[node].cut if isinstance(node, fx.Node) else None

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Emits an operation."""
        return self.graph.call_function(target, args, kwargs)

    def local(self, cut: Cut) -> Size:
        """Returns the size of a cut axis in this process."""
        _, start, stop = self.rows
        if isinstance(start, int):
            return (stop - start) * cut.unit
        if self._own is None:
            self._own = self.call(operator.sub, stop, start)
        return self.product(self._own, cut.unit)

    def unknown(self, node: Any) -> Value:
        """Emits an operation on whole values."""
        if node.target in _STRIDE_DEPENDENT and node in self._batch_dependent:
            return self._on_contiguous(node)
        args = fx.map_arg(node.args, self.whole_of)
        kwargs = fx.map_arg(node.kwargs, self.whole_of)
        return Value(self.graph.call_function(node.target, args, kwargs))

    def _on_contiguous(self, node: Any) -> Value:
        """Emits an operation that depends on strides, which may differ from the record's."""
        if self.shapes.is_plain(node.args[0]):
            args, kwargs = fx.map_arg((node.args, node.kwargs), self.whole_of)
            plain = self.call(torch.Tensor.contiguous, args[0])
            value = Value(self.call(node.target, plain, *args[1:], **kwargs))
            value.is_moved = True
            return value
        if self.shapes.is_dynamic:
            raise Refused(f"several processes ({node.target})")
        raise StrategyError(
            "the step cannot be split over processes.\n"
            "  expected: `as_strided` of contiguous tensors only\n"
            f"  got:      {node.target} of a tensor that is not contiguous\n"
            "  to fix:   call `contiguous()` before"
        )

    def whole_of(self, node: Any) -> Any:
        """Returns a whole value, given by its node in the record."""
        return self.whole(self.values[node])

    def whole(self, value: Value) -> Any:
        """Returns a whole value; gathers the rows of other processes once."""
        self._settle(value)
        if value.cut is not None:
            axis, unit = value.cut
            start, total = (self.product(n, unit) for n in (self.rows.start, self.rows.total))
            value.node = self.call(gather, value.node, axis, start, total)
            value.cut, value.is_moved = None, True
        return value.node

    def settled(self, node: Any) -> Value:
        """Returns a value after its pending sum."""
        value = self.values[node]
        self._settle(value)
        return value

    def cut(self, node: Any, cut: Cut) -> Any:
        """Returns this process's part of a value, for a cut; the whole if it is broadcast there."""
        value = self.settled(node)
        if value.cut == cut:
            return value.node
        self.whole(value)
        if cut.axis < 0 or self.shapes.size(node, cut.axis) == 1:
            return value.node
        if self.shapes.is_dynamic and not self.shapes.is_cut(node, cut):
            raise Refused(f"several processes (`{node}` is broadcast for some sizes)")
        start, stop = (self.product(n, cut.unit) for n in (self.rows.start, self.rows.stop))
        return self.call(aten.slice.Tensor, value.node, cut.axis, start, stop)

    def summed(self, node: Any, before: Value | None = None) -> Value:
        """Returns a value whose sum over processes is pending.

        Args:
            node: The sum over the rows of this process.
            before: The same value in another shape, which may have no other readers.
        """
        value = Value(node, partial=True)
        self._pending.append(value)
        if before in self._pending:
            self._pending.remove(before)
        return value

    def _settle(self, value: Value) -> None:
        """Emits all pending sums as one message, if this value is one of them."""
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
        if not isinstance(value.cut, list) or self.shapes.rank(node) is None:
            return Value(item)
        if value.partial[place]:
            return self.summed(item)
        return Value(item, value.cut[place])


def _written(node: Any) -> list[Any]:
    """Returns the values that an operation updates in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    places = [i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]
    given = [node.args[place] for place in places if place < len(node.args)]
    flat = [each for one in given for each in (one if isinstance(one, (list, tuple)) else [one])]
    return [each for each in flat if isinstance(each, fx.Node)]


_STRIDE_DEPENDENT = (aten.as_strided.default, aten.sym_stride.int, aten.sym_storage_offset.default)
Rule = Callable[[Partition, Any], Value | None]
