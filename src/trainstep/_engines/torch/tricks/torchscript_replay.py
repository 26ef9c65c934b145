"""torch: a recorded step, replayed by the interpreter of TorchScript.

It calls the same operations in the same order as Python would, in a third of the time. The record
is written down operation by operation in TorchScript's own terms, so nothing is compiled, and what
it cannot say is replayed by Python. Not so the swapping of new values into the parameters: the
interpreter lets other threads run beside it, and one that reads a parameter then would crash.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from trainstep._engines.torch.state import swap_in
from trainstep._engines.torch.tricks import lean_graph

log = logging.getLogger("trainstep")

_MOST = 2  # switches
_PAYS = 256  # calls after which another record, that computes no results, is likely to pay
_optimized: Callable[[], bool] = torch._C._get_graph_executor_optimize
_set_optimized: Callable[[bool], None] = torch._C._set_graph_executor_optimize
# What TorchScript has numbers for.
_NUMBERS: dict[Any, int] = {
    torch.strided: 0,
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
_OF_NUMBERS = {"aten::add", "aten::sub", "aten::mul", "aten::div", "aten::floor_divide"}
_FOR_NUMBERS = {("", "Scalar"), ("Tensor", "Scalar"), ("Tensor_mode", "Scalar_mode")}
_TENSORS = torch._C.ListType.ofTensors()
_MAYBE_TENSORS = torch._C.ListType(torch._C.OptionalType.ofTensor())
_LISTS = {
    "List[int": torch._C.ListType.ofInts(),
    "List[float": torch._C.ListType.ofFloats(),
    "List[bool": torch._C.ListType.ofBools(),
    "List[Tensor": _TENSORS,
}


class Replay:
    """Runs a record of operations.

    Args:
        module: The record.
        switches: The places of single bools among its inputs. Whoever sets one sets it for many
            steps, so there is a record for each of its values.
        written: The places of the inputs that the first results are the new values of. Those are
            swapped in, and the others returned. What the record does not read comes last.
        lean: Whether to take out of the record what does not change its numbers.
        script: Whether TorchScript runs it, where it can.
    """

    def __init__(
        self,
        module: GraphModule,
        switches: Sequence[int] = (),
        written: Sequence[int] = (),
        *,
        lean: bool = True,
        script: bool = True,
    ) -> None:
        self._module, self._written, self._lean, self._script = module, written, lean, script
        self._switches = switches if lean and len(switches) <= _MOST else ()
        self._ways: dict[Any, _Way] = {}
        if not self._switches:
            self._way()  # what it costs belongs to the compilation

    def __call__(self, *inputs: Any) -> Any:
        return self._way(*[inputs[place].item() for place in self._switches]).run(*inputs)

    def unread(self, *inputs: Any) -> None:
        """The same if nobody reads the results: they are not computed."""
        self._way(*[inputs[place].item() for place in self._switches]).unread(*inputs)

    def _way(self, *values: bool) -> _Way:
        way = self._ways.get(values)
        if way is None:
            known = dict(zip(self._switches, values, strict=True))
            way = self._ways[values] = self._made(known)
        return way

    def _made(self, known: Mapping[int, bool]) -> _Way:
        module = self._module
        if self._lean:
            try:
                module = lean_graph.lean(module, known)
            except Exception as error:  # a graph of a form that it does not know, say
                log.debug("a step is replayed as it was recorded: %s", error)
        return _Way(module, self._written, script=self._script)


class _Way:
    """Runs a record for known values of its switches, by TorchScript or by Python."""

    def __init__(self, module: GraphModule, written: Sequence[int], *, script: bool) -> None:
        self._module, self._written, self._calls = module, written, 0
        self._script = script
        self.run = self._run_unread = _swapping(_forward(module, script), module, written)

    def unread(self, *inputs: Any) -> None:
        """Runs it for what it writes; from some call on, that is all that it computes."""
        self._calls += 1
        if self._calls == _PAYS:
            with contextlib.suppress(Exception):  # what has run so far runs on
                silent = lean_graph.without_outputs(self._module, len(self._written))
                self._run_unread = _swapping(_forward(silent, self._script), silent, self._written)
        self._run_unread(*inputs)


def _swapping(
    forward: Callable[..., Any], module: GraphModule, written: Sequence[int]
) -> Callable[..., Any]:
    """What runs a record, swaps in the first of its results, and gives the others."""
    count = len(module.graph.find_nodes(op="placeholder"))

    def run(*inputs: Any) -> Any:
        results = forward(*inputs[:count])
        swap_in(map(inputs.__getitem__, written), results)
        return results[len(written) :]

    return run


def _forward(module: GraphModule, script: bool) -> Callable[..., Any]:
    if script:
        try:
            return _by_script(module)
        except Exception as error:  # an operation that TorchScript does not know, say
            log.debug("a step is replayed by Python: %s", error)
    return module.forward  # type: ignore[no-any-return]


def _by_script(module: GraphModule) -> Callable[..., Any]:
    script, by_python = scripted(module), module.forward
    draws = any(map(_draws, module.graph.nodes))

    def forward(*inputs: Any) -> Any:
        drawn = torch.get_rng_state() if draws else None
        # Its optimizer, a switch of this thread, joins products of matrices and rounds otherwise.
        before = _optimized()
        try:
            _set_optimized(False)
            return script(*inputs)
        except RuntimeError as error:  # says where in TorchScript it arose; Python's what is wrong
            raised = error.__traceback__
            if raised is not None and raised.tb_next is not None:
                raise  # in Python: by the handler of a signal
            if drawn is not None:
                torch.set_rng_state(drawn)
            return by_python(*inputs)
        finally:
            _set_optimized(before)

    return forward


def scripted(module: GraphModule) -> Callable[..., Any]:
    """A record as a function of TorchScript; raises if that cannot be."""
    graph = torch._C.Graph()
    values: dict[Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = graph.addInput()
        elif node.op == "get_attr":
            values[node] = graph.insertConstant(getattr(module, node.target))
        elif node.op == "output":
            results = [values[each] for each in node.args[0]]
            graph.registerOutput(_list(graph, results, _TENSORS))
        elif node.target is operator.getitem:
            several, place = node.args
            values[node] = values[several][place]
        else:
            values[node] = _called(graph, node, values)
    # Not by `torch.jit`, which would keep it for ever.
    return torch._C.CompilationUnit().create_function("step", graph, False)  # type: ignore[no-any-return]


def _called(graph: Any, node: Node, values: Mapping[Node, Any]) -> Any:
    """A call of an operation: what it gives, a list if it is several."""
    schema = node.target._schema
    if _draws(node) and not node.users:
        raise NotImplementedError(f"{schema.name}, whose numbers nobody reads, would not be drawn")
    if node.kwargs.get("implicit"):
        raise NotImplementedError(f"{schema.name} that is implicit would be left out")
    given = [
        _argument(graph, _value_of(node, place, argument), argument, values)
        for place, argument in enumerate(schema.arguments)
    ]
    call = graph.insertNode(graph.create(schema.name, given, len(schema.returns)))
    several = [_is_list(each.type) for each in schema.returns]
    for output, is_list in zip(call.outputs(), several, strict=True):
        if is_list:
            output.setType(_TENSORS)
    understood = torch._C.parse_schema(call.schema())
    if str(understood) != str(schema) and not _is_of_a_number(schema, understood):
        raise NotImplementedError(f"{schema} would be {understood}")
    results = list(call.outputs())
    if several == [True]:
        count = len(node.meta["val"])
        unpack = graph.insertNode(graph.create("prim::ListUnpack", results, count))
        return list(unpack.outputs())
    if any(several):
        raise NotImplementedError(f"{schema.name}, which gives a list and more")
    return results[0] if len(results) == 1 else results


def _draws(node: Node) -> bool:
    tags = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()
    return torch.Tag.nondeterministic_seeded in tags


def _is_of_a_number(schema: Any, other: Any) -> bool:
    """Whether another operation does just what this one does with a number for a tensor."""
    same = schema.name == other.name and schema.name.rstrip("_") in _OF_NUMBERS
    return same and (schema.overload_name, other.overload_name) in _FOR_NUMBERS


def _value_of(node: Node, place: int, argument: Any) -> Any:
    if place < len(node.args):
        return node.args[place]
    return node.kwargs.get(argument.name, argument.default_value)


def _argument(graph: Any, value: Any, argument: Any, values: Mapping[Node, Any]) -> Any:
    if isinstance(value, Node):
        return values[value]
    kind = str(argument.type).removeprefix("Optional[")
    if isinstance(value, (list, tuple)):
        if any(isinstance(each, Node) for each in value):
            parts = [values[x] if isinstance(x, Node) else graph.insertConstant(x) for x in value]
            return _list(graph, parts, _MAYBE_TENSORS if "List[Optional" in kind else _TENSORS)
        if not value:
            return _list(graph, [], next(_LISTS[each] for each in _LISTS if each in kind))
        value = [float(each) for each in value] if "List[float" in kind else list(value)
    elif kind.startswith("float") and value is not None:
        value = float(value)
    elif isinstance(value, (torch.memory_format, torch.layout)):
        value = _NUMBERS[value]
    return graph.insertConstant(value)


def _list(graph: Any, parts: Sequence[Any], kind: Any) -> Any:
    made = graph.insertNode(graph.create("prim::ListConstruct", list(parts), 1)).output()
    made.setType(kind)
    return made


def _is_list(kind: Any) -> bool:
    return isinstance(kind, torch._C.ListType)
