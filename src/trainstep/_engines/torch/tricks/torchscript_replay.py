"""Trick: replays a recorded step by the interpreter of TorchScript.

It calls the same operations in the same order as Python would, in a third of the time. The record
is translated operation by operation to TorchScript's intermediate form, so nothing is compiled.
Python still swaps the new values into the parameters: the interpreter releases the GIL, and a
thread that reads a parameter during the swap would crash.

It does not apply to a record with an operation that TorchScript does not support: Python replays
it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from trainstep._engines.torch import private
from trainstep._engines.torch.state import swap_in
from trainstep._engines.torch.tricks import lean_graph

log = logging.getLogger("trainstep")

_MAX_SWITCHES = 2  # switches, that is, up to four records
_UNREAD_CALLS = 256  # calls without read outputs after which a record without outputs is built
_C: Any = private.script  # not None: the switchboard has asked
# TorchScript's numbers of enum values.
_NUMBERS: dict[Any, int] = {
    torch.strided: 0,
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
_ARITHMETIC = {"aten::add", "aten::sub", "aten::mul", "aten::div", "aten::floor_divide"}
_SCALAR_OVERLOADS = {("", "Scalar"), ("Tensor", "Scalar"), ("Tensor_mode", "Scalar_mode")}


class Replay:
    """Runs a record of operations.

    Args:
        module: The record.
        switches: The places of scalar bools among its inputs. They rarely change, so there is a
            record for each of their values.
        written: The places of the inputs whose new values are the first results. These are
            swapped in, and the others returned. Inputs that the record does not read come last.
        lean: Whether to simplify the record, see `lean_graph`.
        script: Whether TorchScript runs it, if possible.
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
        self._switches = switches if lean and len(switches) <= _MAX_SWITCHES else ()
        self._records: dict[Any, _Record] = {}
        if not self._switches:
            self._record()  # now, as part of the compilation

    def __call__(self, *inputs: Any) -> Any:
        return self._record(*[inputs[place].item() for place in self._switches]).run(*inputs)

    def unread(self, *inputs: Any) -> None:
        """Runs the record for its writes only; the other results are not needed."""
        self._record(*[inputs[place].item() for place in self._switches]).unread(*inputs)

    def _record(self, *values: bool) -> _Record:
        record = self._records.get(values)
        if record is None:
            known = dict(zip(self._switches, values, strict=True))
            record = self._records[values] = self._made(known)
        return record

    def _made(self, known: Mapping[int, bool]) -> _Record:
        module = self._module
        if self._lean:
            try:
                module = lean_graph.lean(module, known)
            except Exception as error:  # for example, an unsupported form of a graph
                log.debug("a recorded step cannot be simplified: %s", error)
        return _Record(module, self._written, script=self._script)


class _Record:
    """Runs a record for given values of its switches, by TorchScript or by Python."""

    def __init__(self, module: GraphModule, written: Sequence[int], *, script: bool) -> None:
        self._module, self._written, self._calls = module, written, 0
        self._script = script
        self.run = self._run_unread = _swapping(_forward(module, script), module, written)

    def unread(self, *inputs: Any) -> None:
        """Runs it for its writes; after 256 such calls, a record without outputs replaces it."""
        self._calls += 1
        if self._calls == _UNREAD_CALLS:
            with contextlib.suppress(Exception):  # the record with outputs stays in use
                without = lean_graph.without_outputs(self._module, len(self._written))
                self._run_unread = _swapping(
                    _forward(without, self._script), without, self._written
                )
        self._run_unread(*inputs)


def _swapping(
    forward: Callable[..., Any], module: GraphModule, written: Sequence[int]
) -> Callable[..., Any]:
    """Returns a function that runs a record, swaps in its first results, and returns the others."""
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
        except Exception as error:  # for example, an unsupported operation
            log.debug("a step is replayed by Python: %s", error)
    return module.forward  # type: ignore[no-any-return]


def _by_script(module: GraphModule) -> Callable[..., Any]:
    script, by_python = scripted(module), module.forward
    draws = any(map(_draws, module.graph.nodes))
    optimizes, set_optimizes = _C._get_graph_executor_optimize, _C._set_graph_executor_optimize

    def forward(*inputs: Any) -> Any:
        drawn = torch.get_rng_state() if draws else None
        # Off: the optimizer, a thread-local setting, fuses matrix products, which changes rounding.
        before = optimizes()
        try:
            set_optimizes(False)
            return script(*inputs)
        except RuntimeError as error:  # of TorchScript; Python's own error has a better text
            raised = error.__traceback__
            if raised is not None and raised.tb_next is not None:
                raise  # raised in Python, by a signal handler
            if drawn is not None:
                torch.set_rng_state(drawn)
            return by_python(*inputs)
        finally:
            set_optimizes(before)

    return forward


def scripted(module: GraphModule) -> Callable[..., Any]:
    """Returns a record as a TorchScript function; raises if that is not possible."""
    graph = _C.Graph()
    values: dict[Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = graph.addInput()
        elif node.op == "get_attr":
            values[node] = graph.insertConstant(getattr(module, node.target))
        elif node.op == "output":
            results = [values[each] for each in node.args[0]]
            graph.registerOutput(_list(graph, results, _list_types()["List[Tensor"]))
        elif node.target is operator.getitem:
            several, place = node.args
            values[node] = values[several][place]
        else:
            values[node] = _called(graph, node, values)
    # Not with `torch.jit`, which would keep it for ever.
    return _C.CompilationUnit().create_function("step", graph, False)  # type: ignore[no-any-return]


def _called(graph: Any, node: Node, values: Mapping[Node, Any]) -> Any:
    """Inserts a call of an operation; returns its result, or a list of several."""
    schema = node.target._schema
    if _draws(node) and not node.users:
        raise NotImplementedError(
            f"{schema.name} without readers would be removed, with its effect on the RNG state"
        )
    if node.kwargs.get("implicit"):
        raise NotImplementedError(f"{schema.name} with `implicit` would be removed")
    given = [
        _argument(graph, _value_of(node, place, argument), argument, values)
        for place, argument in enumerate(schema.arguments)
    ]
    call = graph.insertNode(graph.create(schema.name, given, len(schema.returns)))
    several = [_is_list(each.type) for each in schema.returns]
    for output, is_list in zip(call.outputs(), several, strict=True):
        if is_list:
            output.setType(_list_types()["List[Tensor"])
    resolved = _C.parse_schema(call.schema())
    if str(resolved) != str(schema) and not _is_scalar_overload(schema, resolved):
        raise NotImplementedError(f"{schema} would become {resolved}")
    results = list(call.outputs())
    if several == [True]:
        count = len(node.meta["val"])
        unpack = graph.insertNode(graph.create("prim::ListUnpack", results, count))
        return list(unpack.outputs())
    if any(several):
        raise NotImplementedError(f"{schema.name}, which returns a list and other results")
    return results[0] if len(results) == 1 else results


def _draws(node: Node) -> bool:
    tags = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()
    return torch.Tag.nondeterministic_seeded in tags


def _is_scalar_overload(schema: Any, other: Any) -> bool:
    """Whether another operation is this one with a number in place of a tensor."""
    same = schema.name == other.name and schema.name.rstrip("_") in _ARITHMETIC
    return same and (schema.overload_name, other.overload_name) in _SCALAR_OVERLOADS


def _value_of(node: Node, place: int, argument: Any) -> Any:
    if place < len(node.args):
        return node.args[place]
    return node.kwargs.get(argument.name, argument.default_value)


def _argument(graph: Any, value: Any, argument: Any, values: Mapping[Node, Any]) -> Any:
    if isinstance(value, Node):
        return values[value]
    kind = str(argument.type).removeprefix("Optional[")
    if isinstance(value, (list, tuple)):
        types = _list_types()
        if any(isinstance(each, Node) for each in value):
            parts = [values[x] if isinstance(x, Node) else graph.insertConstant(x) for x in value]
            return _list(graph, parts, types["List[Opt" if "List[Opt" in kind else "List[Tensor"])
        if not value:
            return _list(graph, [], next(made for name, made in types.items() if name in kind))
        value = [float(each) for each in value] if "List[float" in kind else list(value)
    elif kind.startswith("float") and value is not None:
        value = float(value)
    elif isinstance(value, (torch.memory_format, torch.layout)):
        value = _NUMBERS[value]
    return graph.insertConstant(value)


@functools.cache
def _list_types() -> dict[str, Any]:
    """Returns TorchScript's types of lists, by the beginning of their names in schemas."""
    return {
        "List[int": _C.ListType.ofInts(),
        "List[float": _C.ListType.ofFloats(),
        "List[bool": _C.ListType.ofBools(),
        "List[Tensor": _C.ListType.ofTensors(),
        "List[Opt": _C.ListType(_C.OptionalType.ofTensor()),
    }


def _list(graph: Any, parts: Sequence[Any], kind: Any) -> Any:
    made = graph.insertNode(graph.create("prim::ListConstruct", list(parts), 1)).output()
    made.setType(kind)
    return made


def _is_list(kind: Any) -> bool:
    return isinstance(kind, _C.ListType)
