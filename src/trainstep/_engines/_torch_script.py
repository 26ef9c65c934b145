"""torch: a recorded step, replayed by the interpreter of TorchScript.

It calls the same operations in the same order as Python would, in a third of the time. The record
is written down operation by operation in TorchScript's own terms, so nothing is compiled, and what
it cannot say is replayed by Python.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from trainstep._engines._torch_lean import lean

log = logging.getLogger("trainstep")

_MOST = 2  # switches
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


def replayed(module: GraphModule, switches: Sequence[int] = ()) -> Callable[..., Any]:
    """What runs a record of operations.

    Args:
        module: The record.
        switches: The places of single bools among its inputs. Whoever sets one sets it for many
            steps, so there is a record for each of its values.
    """
    if not switches or len(switches) > _MOST:
        return _replayed(module, {})
    ways: dict[Any, Callable[..., Any]] = {}

    def run(*inputs: Any) -> Any:
        values = tuple([inputs[place].item() for place in switches])
        way = ways.get(values)
        if way is None:
            known = dict(zip(switches, values, strict=True))
            way = ways[values] = _replayed(module, known)
        return way(*inputs)

    return run


def _replayed(module: GraphModule, known: Mapping[int, bool]) -> Callable[..., Any]:
    try:
        module = lean(module, known)
        script = scripted(module)
    except Exception as error:  # of an operation that it does not know, say; Python replays it
        log.debug("a step is replayed by Python: %s", error)
        return module.forward  # type: ignore[no-any-return]
    forward = module.forward
    draws = any(map(_draws, module.graph.nodes))

    def run(*inputs: Any) -> Any:
        drawn = torch.get_rng_state() if draws else None
        # Its optimizer, a switch of this thread, joins products of matrices and rounds otherwise.
        before = _optimized()
        try:
            _set_optimized(False)
            return script(*inputs)
        except RuntimeError:  # says where in TorchScript it arose; Python's says what is wrong
            if drawn is not None:
                torch.set_rng_state(drawn)
            return forward(*inputs)
        finally:
            _set_optimized(before)

    return run


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
            graph.registerOutput(_list(graph, [values[each] for each in node.args[0]], _TENSORS))
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
