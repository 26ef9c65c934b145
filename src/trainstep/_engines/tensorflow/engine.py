"""TensorFlow: a step becomes one graph that reads the variables first and assigns them last.

During a trace, the value of a Keras variable is a plain tensor (`tensorflow/state.py`), so the step
is pure. The assignments depend on all other operations: if one fails, no variable has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from trainstep._common.errors import calls_the_host
from trainstep._engines.contract import (
    Axes,
    Engine,
    Executable,
    Loss,
    Options,
    Sizes,
    Step,
    Tensor,
    Traced,
    Variable,
    Wanted,
    chosen,
    is_wanted,
)
from trainstep._engines.shared.host_function import Host, HostFunction, Results, raising_host_errors
from trainstep._engines.tensorflow import tricks
from trainstep._engines.tensorflow.host import host_call
from trainstep._engines.tensorflow.state import (
    prepare,
    release_graph,
    variable_class,
    variable_methods,
)
from trainstep._engines.tensorflow.unknown_sizes import lengths, unknown_sizes
from trainstep._engines.tensorflow.unknown_sizes import specs as sizes_unknown
from trainstep._state.scopes import Branch, Recorder

_ROWS_PER_TENSOR = 256  # rows that one operation converts
_LARGE = 1 << 14  # bytes; larger rows are converted one by one


class TensorFlowEngine(Engine):
    """The engine for Keras on TensorFlow."""

    name = "tensorflow"
    compiles_at_first_run = True
    compilers: tuple[str, ...] = ("graph", "xla")
    is_synchronous = True
    sizes = "dynamic"

    def layout(self, kind: str, devices: Sequence[Any] | None) -> Any:
        from trainstep._engines.tensorflow.layout import layout

        return layout(kind, devices)

    def connect(
        self, address: str, count: int, index: int, *, heartbeat: float, timeout: float
    ) -> Any:
        from trainstep._engines.tensorflow.processes import connect

        return connect(address, count, index, timeout=timeout)

    def broadcast(self, value: Any) -> Any:
        return _group().broadcast(value)

    def rows(self, array: Any) -> Iterable[Any]:
        # An additional copy of large rows takes longer. Unsupported dtypes are passed on: the check
        # of batches reports them.
        plain = array.dtype.kind in "fiub" and array.dtype.itemsize <= 8
        if array[:1].nbytes > _LARGE or not plain:
            yield from array
            return
        for start in range(0, len(array), _ROWS_PER_TENSOR):
            yield from tf.unstack(tricks.tensor_of(array[start : start + _ROWS_PER_TENSOR]))

    def preempted(self, step: int, asked: bool) -> bool:
        return any(_group().all_gather(asked))

    def shape(self, x: Any) -> tuple[int, ...]:
        return tuple(x.shape)

    def is_array(self, x: Any) -> bool:
        return isinstance(x, tf.Tensor) and not tf.is_symbolic_tensor(x)

    def is_tensor(self, x: Any) -> bool:
        return isinstance(x, (tf.Tensor, tf.IndexedSlices, np.ndarray, np.generic))

    def tensor(self, x: Any) -> Tensor:
        return tf.convert_to_tensor(x)

    def current_graph(self) -> Any:
        return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def is_idle(self) -> bool:
        return tf.executing_eagerly()  # type: ignore[no-any-return]

    def asks_for_a_value(self, error: BaseException) -> bool:
        return (
            isinstance(error, tf.errors.OperatorNotAllowedInGraphError)
            or (
                isinstance(error, (TypeError, NotImplementedError))
                and any(word in str(error) for word in ("ymbolic", "eager execution"))
            )
            or (isinstance(error, AttributeError) and "numpy" in str(error))
        )

    def trace(
        self,
        step: Step,
        leaves: Sequence[Any],
        recorder: Recorder,
        options: Options,
        axes: Axes | None = None,
    ) -> Traced:
        variable_class()
        writes: list[Variable] = []
        stand_ins: list[Tensor] = []
        record: list[Any] = []
        by_graph = options.layout is None and options.optimize in ("auto", "trace")
        fusing, settle_norms = tricks.fused_norms(by_graph=by_graph)

        def body(*tensors: Tensor) -> list[Tensor]:
            graph = tf.compat.v1.get_default_graph()
            prepare(recorder, graph, stand_ins)
            outputs = [tf.convert_to_tensor(x) for x in step(tensors)]
            new = recorder.new_values()
            settle_norms(graph)
            effects = [
                op
                for op in graph.get_operations()
                if op.op_def.is_stateful and op.type != "ReadVariableOp"
            ]
            writes.extend(recorder.writes.values())
            if options.layout is None:
                _commit(writes, new, [*outputs, *effects])
            else:
                record.append((graph, tensors, outputs, new, effects))
            return outputs

        specs = [tf.TensorSpec(x.shape[bool(options.repeat) :], x.dtype) for x in leaves]
        if axes is not None:
            specs = sizes_unknown(leaves, axes)
        try:
            with recorder, fusing, lengths(), nullcontext() if axes is None else unknown_sizes():
                concrete = tf.function(body, autograph=False).get_concrete_function(*specs)
        finally:
            release_graph(recorder.home, stand_ins)

        hosts = recorder.hosts
        if options.layout is not None:
            if hosts:
                raise calls_the_host()
            return _partitioned(record[0], leaves, axes, recorder, options)
        if options.repeat:
            specs = [tf.TensorSpec(x.shape, x.dtype) for x in leaves]

        def build(compiler: str, bucket: Sizes | None = None) -> Executable:
            jit = compiler == "xla"
            step = tricks.rewritten(concrete) if jit else concrete
            if options.repeat:
                step = partial(_repeated, step, options.repeat)
            elif not jit:
                return _executable(step, hosts)
            whole = tf.function(partial(step), autograph=False, jit_compile=jit)
            run = _executable(whole.get_concrete_function(*specs), hosts)
            run.step = step  # type: ignore[attr-defined]  # TensorFlow deletes unreferenced functions
            return run

        compilers = ("graph",) if hosts else self.compilers  # XLA cannot call the host
        return Traced(list(recorder.reads.values()), writes, build, compilers=compilers)

    def differentiate(
        self, call: Loss, variables: Wanted, leaves: Sequence[Tensor], *, each: bool = False
    ) -> tuple[Tensor, Any, list[Any], list[Any]]:
        sources: dict[int, Tensor] = {}
        wanted = is_wanted(variables)

        def lift(variable: Variable, value: Tensor) -> Tensor:
            if not wanted(variable) or not value.dtype.is_floating:
                return value
            # In the graph of the differentiation; a branch that reads the variable captures it.
            with nullcontext() if branch.home is None else branch.home.as_default():
                source = sources[id(variable)] = tf.identity(value)
            if "assign" in getattr(value, "__dict__", ()):  # an optimizer may run inside the loss
                source.__dict__.update(variable_methods(source, variable))
            tape.watch(source)
            return source

        leaves = [tf.identity(leaf) for leaf in leaves]
        branch = Branch(lift, self.current_graph)
        with tf.GradientTape(persistent=each, watch_accessed_variables=False) as tape:
            tape.watch(leaves)
            with branch:
                value, aux = call(leaves)
        for source in sources.values():
            getattr(source, "__dict__", {}).clear()  # see `release_graph`
        variables = chosen(variables, [branch.held[key] for key in sources])
        branch.give_back(branch.new_values())
        found = [sources.get(id(v)) for v in variables]
        known = [source for source in found if source is not None]
        by_variable: list[Any] = []
        by_leaf: list[Any] = []
        for one in value if each else [value]:
            by_source = iter(tape.gradient(one, [*known, *leaves], unconnected_gradients="zero"))
            by_variable.append(
                [
                    tf.zeros_like(branch.outer_value(v))
                    if source is None
                    else tf.convert_to_tensor(next(by_source))
                    for v, source in zip(variables, found, strict=True)
                ]
            )
            by_leaf.append([tf.convert_to_tensor(g) for g in by_source])
        if not each:
            (by_variable,), (by_leaf,) = by_variable, by_leaf
        return value, aux, by_variable, by_leaf

    def host_call(
        self, fn: HostFunction, tensors: Sequence[Tensor], results: Results
    ) -> list[Tensor]:
        return host_call(fn, tensors, results)


def _partitioned(
    record: Any, leaves: Sequence[Any], axes: Axes | None, recorder: Recorder, options: Options
) -> Traced:
    """Partitions a recorded step over several devices."""
    from trainstep._engines.tensorflow.layout import Record

    reads, writes = list(recorder.reads.values()), list(recorder.writes.values())
    given = [leaf[0] for leaf in leaves] if options.repeat else leaves
    every = list({id(v): v for v in (*reads, *writes)}.values())
    concrete = options.layout.partition(
        Record(*record), given, axes, partial(_commit, writes), every
    )

    def build(compiler: str, bucket: Sizes | None = None) -> Executable:
        run = options.layout.guarded(_executable(concrete, ()))
        return _one_by_one(run, options.repeat) if options.repeat else run

    return Traced(reads, writes, build, compilers=("graph",))


def _one_by_one(step: Executable, count: int) -> Executable:
    """Returns an executable that runs `count` steps, one after the other."""

    def steps(leaves: Sequence[Any]) -> list[Tensor]:
        results = [step([leaf[index] for leaf in leaves]) for index in range(count)]
        return [tf.stack(outputs) for outputs in zip(*results, strict=True)]

    return steps


def _commit(writes: Sequence[Variable], new: Sequence[Tensor], before: Sequence[Any]) -> None:
    """Assigns new values, after all of them and all other operations are computed."""
    with tf.control_dependencies([*new, *before]):
        settled = tf.no_op("settled")
    with tf.control_dependencies([settled]):
        for variable, value in zip(writes, new, strict=True):
            variable._value.assign(value, read_value=False)


def _group() -> Any:
    from trainstep._engines.tensorflow.processes import group

    return group()


def make() -> TensorFlowEngine:
    """Returns the engine."""
    return TensorFlowEngine()


def _repeated(step: Any, count: int, *stacked: Tensor) -> list[Tensor]:
    """Records `count` steps, one after the other."""
    results: list[Any] = []
    graph = tf.compat.v1.get_default_graph()
    for index in range(count):
        # Explicit: steps without common variables may still have host calls, whose order matters.
        with tf.control_dependencies(graph.get_operations()):
            results.append(step(*(x[index] for x in stacked)))
    return [tf.stack(outputs) for outputs in zip(*results, strict=True)]


def _executable(concrete: Any, hosts: Sequence[Host]) -> Executable:
    run = tricks.executable(concrete)
    run.graph = concrete  # type: ignore[attr-defined]  # keeps the function alive
    return raising_host_errors(run, hosts) if hosts else run
