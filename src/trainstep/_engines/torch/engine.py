"""PyTorch: a step becomes a graph of tensor operations, replayed or compiled by inductor.

The user's Python runs once, under `make_fx`, on clones: forward, backward and optimizer are
recorded as plain operations. A variable that the trace reads becomes an input of the graph. Keras's
torch optimizers use in-place updates; the graph clones such inputs first, so it is pure, and all
new values are swapped into the parameters at the end. A step with dynamic sizes is recorded
likewise, on stand-ins without values (`torch/symbolic_sizes.py`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from trainstep._common.codegen import Source
from trainstep._common.errors import calls_the_host
from trainstep._engines.contract import (
    Axes,
    Engine,
    Executable,
    Loss,
    Options,
    Refused,
    Sizes,
    Step,
    Tensor,
    Traced,
    Variable,
    Wanted,
    chosen,
    is_wanted,
    nothing_assumed,
)
from trainstep._engines.shared.host_function import HostFunction, Results
from trainstep._engines.torch.eager import eager
from trainstep._engines.torch.host import host_call, token_input
from trainstep._engines.torch.private import symbols
from trainstep._engines.torch.program import build
from trainstep._engines.torch.record import input_of, own_copy, tidy, unalias
from trainstep._engines.torch.state import WIDENED, from_numpy, leaf_copy, memory, set_grad_enabled
from trainstep._engines.torch.torch_modules import follow_variables
from trainstep._engines.torch.trace_guard import TensorValueNeeded, TraceGuard
from trainstep._state.control_flow import Uncompilable
from trainstep._state.scopes import Branch, Recorder

_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)
_ARRAYS = (torch.Tensor, np.ndarray, np.generic, *_SIZES)  # symbolic sizes are not constants


class TorchEngine(Engine):
    """The engine for Keras on torch."""

    name = "torch"
    compilers: tuple[str, ...] = ("graph", "inductor")
    branches_by_value = True
    size_one_is_separate = True
    is_synchronous = True
    sizes = "dynamic"

    def __init__(self) -> None:
        self._depth = threading.local()

    def layout(self, kind: str, devices: Sequence[Any] | None) -> Any:
        from trainstep._engines.torch.layout import layout

        return layout(kind, devices)

    def connect(
        self, address: str, count: int, index: int, *, heartbeat: float, timeout: float
    ) -> Any:
        from trainstep._engines.torch.processes import connect

        return connect(address, count, index, timeout=timeout)

    def broadcast(self, value: Any) -> Any:
        from trainstep._engines.torch.processes import broadcast

        return broadcast(value)

    def rng_state(self) -> Any:
        return torch.get_rng_state().numpy()

    def set_rng_state(self, state: Any) -> None:
        torch.set_rng_state(torch.from_numpy(np.array(state)))

    def preempted(self, step: int, asked: bool) -> bool:
        from trainstep._engines.torch.processes import any_of

        return any_of(asked)

    def canonical(self, dtype: str) -> str:
        return WIDENED.get(dtype, dtype)

    def shape(self, x: Any) -> tuple[int, ...]:
        return x.shape  # type: ignore[no-any-return]

    def is_array(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor)

    def is_tensor(self, x: Any) -> bool:
        return isinstance(x, _ARRAYS)

    def tensor(self, x: Any) -> Tensor:
        if isinstance(x, _SIZES):
            raise Refused("a dynamic size is used, or returned, as a number")
        return x if isinstance(x, torch.Tensor) else from_numpy(np.asarray(x))

    def disk_hits(self) -> int:
        dynamo = sys.modules.get("torch._dynamo.utils")  # imported once inductor has been used
        return int(dynamo.counters["inductor"]["fxgraph_cache_hit"]) if dynamo else 0

    @contextmanager
    def fixed_rng_state(self) -> Iterator[None]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            yield

    def is_idle_source(self) -> Source:
        return Source("True")  # there are no graphs but ours, which have scopes

    def asks_for_a_value(self, error: BaseException) -> bool:
        return isinstance(error, TensorValueNeeded)

    def trace(
        self,
        step: Step,
        leaves: Sequence[Any],
        recorder: Recorder,
        options: Options,
        axes: Axes | None = None,
    ) -> Traced:
        guard = TraceGuard()
        sizes = _FixedSizes() if axes is None else _dynamic_sizes(axes)
        lifted: dict[int, Tensor] = {}
        sources: dict[int, Tensor] = {}
        inputs: list[Any] = []
        updated: list[bool] = []

        def lift(variable: Variable) -> Tensor:
            value = lifted[id(variable)] = input_of(variable, inputs, sizes.copy)
            return value

        def store(variable: Variable, value: Tensor) -> Tensor:
            sources[id(variable)] = value
            return own_copy(value)

        def pure(*tensors: Tensor) -> list[Tensor]:
            outputs = [self.tensor(x) for x in step(tensors)]
            for key, value in lifted.items():
                if guard.updated(value):
                    recorder.writes.setdefault(key, recorder.reads[key])
            updated.extend(map(guard.updated, (*lifted.values(), *tensors)))
            given = {memory(x) for x in (*tensors, *lifted.values())}
            token = [] if recorder.token is None else [recorder.token]
            return [*unalias(guard, recorder, sources, outputs, given), *token]

        recorder.lift, recorder.store = lift, store
        recorder.copied, recorder.shielded = leaf_copy, own_copy
        recorder.updated_in_place = guard.updated
        recorder.first_token = partial(token_input, sizes.copy)
        tensors = [
            x.detach().clone(memory_format=torch.contiguous_format)
            if isinstance(x, torch.Tensor)
            else from_numpy(x.copy())
            for x in (leaf[0] if options.repeat else leaf for leaf in leaves)
        ]
        # Recording computes real values, and changes the RNG state; it is restored for the first
        # step.
        enabled, drawn = torch.is_grad_enabled(), torch.get_rng_state()
        try:
            with recorder, guard:
                module = sizes.record(guard.watching(pure), tensors)
        except Uncompilable as culprit:
            recorder.hosts, recorder.token = [], None
            traced = eager(step, tensors, recorder, str(culprit))
            if options.layout is not None:
                traced = options.layout.in_all(traced, tensors, axes)
            return _repeated(traced, options.repeat) if options.repeat else traced
        finally:
            set_grad_enabled(enabled)
            torch.set_rng_state(drawn)
        tidy(module, updated, as_is=options.layout is None and axes is None)
        reads, writes = list(recorder.reads.values()), list(recorder.writes.values())
        hosts = recorder.hosts
        violated_assumption = sizes.assumptions()
        if options.layout is not None:
            if hosts:
                raise calls_the_host()
            built = options.layout.part(
                module, reads, writes, tensors, axes=axes, violated_assumption=violated_assumption
            )
        traced = Traced(
            reads,
            writes,
            lambda compiler, bucket=None: (
                build(module, reads, writes, tensors, compiler, hosts=hosts, as_is=axes is None)
                if options.layout is None
                else built
            ),
            compilers=() if axes is None and options.layout is None else ("graph",),
            violated_assumption=violated_assumption,
        )
        return _repeated(traced, options.repeat) if options.repeat else traced

    def differentiate(
        self, call: Loss, variables: Wanted, leaves: Sequence[Tensor], *, each: bool = False
    ) -> tuple[Tensor, Any, list[Any], list[Any]]:
        sources: dict[int, Tensor] = {}
        wanted = is_wanted(variables)
        depth = getattr(self._depth, "value", 0)

        def source_of(value: Tensor) -> Tensor:
            # A view inside an outer differentiation, which has to track it; else a new leaf.
            return (
                value.view_as(value)
                if value.requires_grad and depth
                else value.detach().requires_grad_()
            )

        def lift(variable: Variable, value: Tensor) -> Tensor:
            if not wanted(variable) or not value.is_floating_point():
                return value
            source = sources[id(variable)] = source_of(value)
            return source

        branch = Branch(lift, self.current_graph)
        self._depth.value = depth + 1
        try:
            with torch.enable_grad():
                leaves = [source_of(leaf) for leaf in leaves]
                with branch:
                    value, aux = call(leaves)
                variables = chosen(variables, [branch.held[key] for key in sources])
                found = [sources.get(id(v)) for v in variables]
                wrt = [*(source for source in found if source is not None), *leaves]
                values = list(value) if each else [value]
                gradients = [
                    iter(_gradients(one, wrt, create_graph=depth > 0, retain=one is not values[-1]))
                    for one in values
                ]
        finally:
            self._depth.value = depth
        branch.give_back([new if depth else new.detach() for new in branch.new_values()])
        by_variable: list[Any] = [
            [
                torch.zeros_like(branch.outer_value(v)) if source is None else next(of_one)
                for v, source in zip(variables, found, strict=True)
            ]
            for of_one in gradients
        ]
        by_leaf: list[Any] = [list(of_one) for of_one in gradients]
        values = values if depth else [one.detach() for one in values]
        if each:
            return values, aux, by_variable, by_leaf
        return values[0], aux, by_variable[0], by_leaf[0]

    def host_call(
        self, fn: HostFunction, tensors: Sequence[Tensor], results: Results
    ) -> list[Tensor]:
        return host_call(fn, tensors, results)


def make() -> TorchEngine:
    """Returns the engine."""
    follow_variables()
    return TorchEngine()


class _FixedSizes:
    """A trace at the sizes of the call; the counterpart of `DynamicSizes`."""

    def copy(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone()

    def record(self, fn: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
        return make_fx(fn)(*tensors)

    def assumptions(self) -> Callable[[Sizes], str]:
        return nothing_assumed


def _dynamic_sizes(axes: Axes) -> Any:
    if symbols() is None:
        raise Refused(f"torch {torch.__version__} lacks what trainstep needs for that")
    from trainstep._engines.torch.symbolic_sizes import DynamicSizes

    return DynamicSizes(axes)


def _repeated(traced: Traced, count: int) -> Traced:
    """Returns a step that runs `count` steps, one after the other."""

    def build(compiler: str, bucket: Sizes | None = None) -> Executable:
        step = traced.build(compiler)

        def steps(leaves: Sequence[Any]) -> list[Tensor]:
            results = [step([leaf[index] for leaf in leaves]) for index in range(count)]
            return [torch.stack(list(outputs)) for outputs in zip(*results, strict=True)]

        return steps

    return replace(traced, build=build)


def _gradients(
    value: Tensor, wrt: list[Tensor], *, create_graph: bool, retain: bool
) -> list[Tensor]:
    """Returns gradients by tensors; zeros where the value does not depend on one."""
    if not wrt or not value.requires_grad:
        return [torch.zeros_like(x) for x in wrt]
    keep = True if retain else None  # keeps the buffers for the next backward pass
    found = torch.autograd.grad(
        value, wrt, retain_graph=keep, create_graph=create_graph, allow_unused=True
    )
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wrt, found, strict=True)]
