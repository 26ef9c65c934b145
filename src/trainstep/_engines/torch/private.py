"""The private names of torch that trainstep uses, and what it does without each.

Each is a module that has what is used of it, or None. The tricks look here as well. Parts of torch
that take long to import are looked up when they are first needed.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from trainstep._common.private_names import find, need

# Turns gradients on and off by one call in C.
gradients = find("torch._C", "_set_grad_enabled", without="calls of a program cost more")
# Chooses the kernel of a convolution, while a step with dynamic sizes is recorded.
kernels = find(
    "torch._C",
    "_select_conv_backend",
    without="convolutions are recorded for each range of sizes in which a kernel is chosen",
)
# Multiplies a list of tensors by one operation.
lists = find("torch", "_foreach_mul", without="steps with SGD have more operations")
# TorchScript's graphs.
script = find(
    "torch._C",
    "CompilationUnit",
    "Graph",
    "ListType",
    "OptionalType",
    "parse_schema",
    "_get_graph_executor_optimize",
    "_set_graph_executor_optimize",
    without="Python replays recorded steps, instead of TorchScript",
)


class Symbols(NamedTuple):
    """The modules for tensors without values, and for sizes that are symbols."""

    fake_tensor: Any
    source: Any
    printers: Any


@functools.cache
def symbols() -> Symbols | None:
    """Returns these modules; None if one of them is missing."""
    without = "every size of a dynamic axis is compiled by itself"
    found = Symbols(
        fake_tensors(),
        find("torch._dynamo.source", "ConstantSource", without=without),
        find("torch.utils._sympy.printers", "PythonPrinter", without=without),
    )
    return None if None in found else found


@functools.cache
def fake_tensors() -> Any:
    """Returns the module for tensors without values; None if it is missing."""
    return find(
        "torch._subclasses.fake_tensor",
        "FakeTensorMode",
        without="dynamic sizes and several processes are refused, and steps are not rewritten",
    )


def inductor_compile(module: Any, inputs: list[Any]) -> Any:
    """Compiles a recorded step by inductor."""
    return need("torch._inductor", "compile")(module, inputs)
