"""JAX: a step becomes a jaxpr whose inputs are the variables that it read, compiled ahead of time.

The user's Python runs once, to record the step (`jax/record.py`):

    step --make_jaxpr--> equations, some of them `variable` --lift--> jaxpr(state, arguments)
         --jit, lower, compile--> executable, written state donated
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.extend import core as jex

from trainstep._common.errors import ArgumentError, ForeignTraceError
from trainstep._engines.contract import (
    Axes,
    Engine,
    Executable,
    Loss,
    Options,
    Sizes,
    Step,
    Taker,
    Tensor,
    Traced,
    Variable,
    Wanted,
    chosen,
)
from trainstep._engines.jax import disk_cache, tricks
from trainstep._engines.jax.host import host_call
from trainstep._engines.jax.layout import Layout
from trainstep._engines.jax.processes import KeyValues, broadcast, connect, gather, launched
from trainstep._engines.jax.program import build
from trainstep._engines.jax.record import is_tensor, record, replayable, trace_dynamic_sizes
from trainstep._engines.shared.host_function import HostFunction, Results
from trainstep._state.outputs import take_out
from trainstep._state.scopes import Branch, Recorder


class JaxEngine(Engine):
    """The engine for Keras on JAX."""

    name = "jax"
    compilers: tuple[str, ...] = ("xla",)
    loops_have_gradients = False
    sizes = "bucket"
    handles_sigterm = True

    def __init__(self) -> None:
        with jax.ensure_compile_time_eval():
            self._idle_trace = self.current_graph()

    def layout(self, kind: str, devices: Sequence[Any] | None) -> Layout:
        found = jax.devices() if devices is None else [_device(each) for each in devices]
        return Layout(found, shards=kind == "sharded")

    def launched(self) -> tuple[str, int, int] | None:
        return launched()

    def connect(
        self, address: str, count: int, index: int, *, heartbeat: float, timeout: float
    ) -> KeyValues:
        return connect(address, count, index, heartbeat=heartbeat, timeout=timeout)

    def broadcast(self, value: Any) -> Any:
        return broadcast(value)

    def gather(self, variable: Variable) -> Any:
        return gather(variable.value)

    def assign(self, variables: Sequence[Variable], values: Sequence[Any]) -> None:
        tricks.assign(variables, values)

    def taker(self, array: Any) -> Taker:
        return tricks.row_taker(array)

    def preempted(self, step: int, asked: bool) -> bool:
        return bool(multihost_utils.reached_preemption_sync_point(step))

    def canonical(self, dtype: str) -> str:
        if dtype == "bfloat16":
            return dtype
        return str(jax.dtypes.canonicalize_dtype(dtype))

    def shape(self, x: Any) -> tuple[int, ...]:
        return x.shape  # type: ignore[no-any-return]

    def is_tensor(self, x: Any) -> bool:
        return is_tensor(x)

    def tensor(self, x: Any) -> Tensor:
        return jnp.asarray(x)

    def disk_hits(self) -> int:
        return disk_cache.hits()

    def current_graph(self) -> Any:
        return jex.find_top_trace(None)

    def is_idle(self) -> bool:
        return jex.find_top_trace(None) is self._idle_trace

    def is_array(self, x: Any) -> bool:
        return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)

    def inlines(self, function: str) -> bool:
        raise ForeignTraceError(function, "jax.jit")

    def asks_for_a_value(self, error: BaseException) -> bool:
        return isinstance(
            error,
            (
                jax.errors.ConcretizationTypeError,
                jax.errors.TracerArrayConversionError,
                jax.errors.TracerIntegerConversionError,
            ),
        )

    def trace(
        self,
        step: Step,
        leaves: Sequence[Any],
        recorder: Recorder,
        options: Options,
        axes: Axes | None = None,
    ) -> Traced:
        if axes is not None:
            return trace_dynamic_sizes(step, leaves, recorder, options, axes)
        with recorder:
            closed = record(
                recorder,
                step,
                [jax.ShapeDtypeStruct(x.shape[bool(options.repeat) :], x.dtype) for x in leaves],
            )
        # Only now: on leaving the scope, variables that the step created get their values.
        reads, writes = list(recorder.reads.values()), list(recorder.writes.values())
        packable = dict(recorder.packable)
        is_numpy = [type(x) is np.ndarray for x in leaves]

        def build_it(compiler: str, bucket: Sizes | None = None) -> Executable:
            return build(closed, reads, writes, options, packable=packable, is_numpy=is_numpy)

        return Traced(reads, writes, build_it)

    def differentiate(
        self, call: Loss, variables: Wanted, leaves: Sequence[Tensor], *, each: bool = False
    ) -> tuple[Tensor, Any, list[Any], list[Any]]:
        if variables is None or callable(variables):
            found, call = replayable(call, leaves, self.current_graph)
            variables = chosen(variables, found)
        wanted = list({id(v): v for v in variables}.values())  # without duplicates
        parts: dict[str, Any] = {}

        def pure(values: list[Tensor], tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            branch = parts["branch"] = Branch(lambda variable, value: value, self.current_graph)
            branch.held = {id(v): v for v in wanted}
            branch.state_mapping = {id(v): value for v, value in zip(wanted, values, strict=True)}
            with branch:
                value, aux = call(tensors)
            aux_tensors, parts["aux"] = take_out(aux, self.is_tensor, ())
            parts["count"] = len(aux_tensors)
            return value, [*aux_tensors, *branch.new_values()]

        outer = Branch(lambda variable, value: value, self.current_graph)
        values = [outer.outer_value(v) for v in wanted]
        gradients: list[tuple[list[Tensor], list[Tensor]]]
        if each:
            value, extra, gradients = _gradients_of_each(pure, values, list(leaves))
        else:
            (value, extra), by_both = jax.value_and_grad(pure, argnums=(0, 1), has_aux=True)(
                values, list(leaves)
            )
            gradients = [by_both]
        parts["branch"].give_back(extra[parts["count"] :])
        place = {id(v): i for i, v in enumerate(wanted)}
        by_variable = [[one[place[id(v)]] for v in variables] for one, _ in gradients]
        by_leaf = [one for _, one in gradients]
        if not each:
            (by_variable,), (by_leaf,) = by_variable, by_leaf
        return value, parts["aux"].of(extra), by_variable, by_leaf

    def host_call(
        self, fn: HostFunction, tensors: Sequence[Tensor], results: Results
    ) -> list[Tensor]:
        return host_call(fn, tensors, results)


def _gradients_of_each(
    pure: Callable[..., Any], values: list[Tensor], leaves: list[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[tuple[list[Tensor], list[Tensor]]]]:
    """Returns several values, the aux, and the gradients of each value, from one forward pass."""
    found, linear, extra = jax.linearize(pure, values, leaves, has_aux=True)
    gradients = []
    for i, value in enumerate(found):
        back = jax.linear_transpose(lambda *given, i=i: linear(*given)[i], values, leaves)
        gradients.append(back(jnp.ones_like(value)))
    return found, extra, gradients


def make() -> JaxEngine:
    """Returns the engine."""
    return JaxEngine()


def _device(named: Any) -> Any:
    """Returns a JAX device, given as itself, as its number, or as a name like `"cpu:1"`."""
    if isinstance(named, (int, str)):
        platform, _, number = str(named).rpartition(":")
        found = [
            each
            for each in jax.devices(platform.lower() or None)
            if number.isdecimal() and each.id == int(number)
        ]
        if found:
            return found[0]
    elif isinstance(named, jax.Device):
        return named
    raise ArgumentError(
        "Mirrored",
        "devices",
        f"JAX devices, their numbers or names: {', '.join(map(str, jax.devices()))}",
        repr(named),
        "pass some of `jax.devices()`, or nothing for all of them",
    )
