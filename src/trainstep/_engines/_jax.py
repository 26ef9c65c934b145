"""JAX: a step becomes a jaxpr whose inputs are the variables that it read, compiled ahead of time.

The user's Python runs once. A variable read while tracing is bound as an equation of a primitive
of ours at the top of the trace; afterwards those equations' results become inputs of the jaxpr.
So variables need not be known beforehand, and a model that builds itself costs no second trace.

    step --make_jaxpr--> equations, some of them `variable` --lift--> jaxpr(state, arguments)
         --jit, lower, compile--> executable, written state donated
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat, starmap
from operator import itemgetter, setitem
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from trainstep._engines._base import (
    Executable,
    Loss,
    Options,
    Step,
    Tensor,
    Traced,
    Variable,
    Wanted,
    chosen,
)
from trainstep._errors import ForeignTraceError
from trainstep._outputs import take_out
from trainstep._source import Source, define
from trainstep._state import Branch, Recorder, Recording, current_scope

# What `jex.find_top_trace` returns, three Python calls nearer; every step asks for it.
_trace_state = sys.modules[jex.find_top_trace.__module__].trace_state_strong_ref

_variable_p = jex.Primitive("variable")
_variable_p.def_abstract_eval(lambda *, index, aval: aval)

_value = itemgetter("_value")
_consume: Callable[[Iterable[Any]], None] = deque(maxlen=0).extend


class JaxEngine:
    """The engine for Keras on JAX."""

    name = "jax"
    compiles_at_first_run = False
    compilers: tuple[str, ...] = ("xla",)
    branches_by_value = False

    def __init__(self) -> None:
        with jax.ensure_compile_time_eval():
            self._eager = self.place()
            self.array_types: tuple[type, ...] = (type(jnp.zeros(())),)

    def canonical(self, dtype: str) -> str:
        if dtype == "bfloat16":
            return dtype
        return str(jax.dtypes.canonicalize_dtype(dtype))

    def shape(self, x: Any) -> tuple[int, ...]:
        return x.shape  # type: ignore[no-any-return]

    def is_tensor(self, x: Any) -> bool:
        return _is_tensor(x)

    def tensor(self, x: Any) -> Tensor:
        return jnp.asarray(x)

    def place(self) -> Any:
        return jex.find_top_trace(None)

    def idle(self) -> bool:
        return _trace_state.value is self._eager

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
        self, step: Step, leaves: Sequence[Any], recorder: Recorder, options: Options
    ) -> Traced:
        with recorder:
            closed = _record(
                recorder,
                step,
                [jax.ShapeDtypeStruct(x.shape[bool(options.repeat) :], x.dtype) for x in leaves],
            )
        # Variables that the step created have their values now.
        reads, writes = list(recorder.reads.values()), list(recorder.writes.values())
        if options.repeat:
            closed, reads = _repeated(closed, reads, writes, options.repeat)
        return Traced(reads, writes, lambda compiler: _build(closed, reads, writes, options))

    def differentiate(
        self, call: Loss, variables: Wanted, leaves: Sequence[Tensor]
    ) -> tuple[Tensor, Any, list[Tensor], list[Tensor]]:
        if variables is None or callable(variables):
            found, call = _replayable(call, leaves, self.place)
            variables = chosen(variables, found)
        wanted = list({id(v): v for v in variables}.values())  # one that comes twice counts once
        parts: dict[str, Any] = {}

        def pure(values: list[Tensor], tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            branch = parts["branch"] = Branch(lambda variable, value: value, self.place)
            branch.held = {id(v): v for v in wanted}
            branch.state_mapping = {id(v): value for v, value in zip(wanted, values, strict=True)}
            with branch:
                value, aux = call(tensors)
            aux_tensors, parts["aux"] = take_out(aux, self.is_tensor, ())
            parts["count"] = len(aux_tensors)
            return value, [*aux_tensors, *branch.new_values()]

        outer = Branch(lambda variable, value: value, self.place)
        values = [outer.outer_value(v) for v in wanted]
        (value, extra), (by_variable, by_leaf) = jax.value_and_grad(
            pure, argnums=(0, 1), has_aux=True
        )(values, list(leaves))
        parts["branch"].give_back(extra[parts["count"] :])
        by_id = dict(zip(map(id, wanted), by_variable, strict=True))
        return value, parts["aux"].of(extra), [by_id[id(v)] for v in variables], by_leaf


def make() -> JaxEngine:
    """The engine."""
    return JaxEngine()


def _is_tensor(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


# Recording ------------------------------------------------------------------------------------


def _record(scope: Recording, step: Step, leaves: Sequence[Any]) -> Any:
    """Traces `step` in a scope; returns a closed jaxpr whose first inputs are the scope's reads.

    Its outputs are the new values of the scope's writes, then those of the step.
    """

    def pure(*tensors: Tensor) -> list[Tensor]:
        trace = scope.home = scope.place()

        def lift(variable: Variable) -> Tensor:
            # At the top of this trace, wherever the read is: a loop body closes over it.
            with jex.set_current_trace(trace):
                return _variable_p.bind(index=len(scope.reads) - 1, aval=_aval(variable))

        scope.lift = lift
        outputs = step(tensors)
        return [*scope.new_values(), *outputs]

    closed = jax.make_jaxpr(pure)(*leaves)
    jaxpr = closed.jaxpr
    lifted = {e.params["index"]: e.outvars[0] for e in jaxpr.eqns if e.primitive is _variable_p}
    jaxpr = jaxpr.replace(
        invars=[*(lifted[index] for index in range(len(scope.reads))), *jaxpr.invars],
        eqns=[e for e in jaxpr.eqns if e.primitive is not _variable_p],
        debug_info=_unnamed(jaxpr.debug_info, len(scope.reads)),
    )
    return jex.ClosedJaxpr(jaxpr, closed.consts)


def _unnamed(info: Any, count: int) -> Any:
    """JAX's names of the inputs, with empty ones for the variables in front."""
    return info._replace(arg_names=("",) * count + (info.arg_names or ()))


def _aval(variable: Variable) -> Any:
    value = variable._value
    dtype = jax.dtypes.canonicalize_dtype(variable._dtype) if value is None else value.dtype
    return jax.core.ShapedArray(tuple(variable.shape), dtype)


def _replayable(
    call: Loss, leaves: Sequence[Tensor], place: Callable[[], Any]
) -> tuple[list[Variable], Loss]:
    """The variables that `call` reads, and an equivalent of it that runs no Python again."""
    scope = Recording(place)
    aux_of: list[Any] = []

    def step(tensors: Sequence[Tensor]) -> list[Tensor]:
        value, aux = call(tensors)
        aux_tensors, build = take_out(aux, _is_tensor, ())
        aux_of.append(build)
        return [value, *aux_tensors]

    with scope:
        run = jex.jaxpr_as_fun(_record(scope, step, leaves))
    reads, writes = list(scope.reads.values()), list(scope.writes.values())

    def replay(tensors: Sequence[Tensor]) -> tuple[Tensor, Any]:
        here = current_scope()
        results = iter(run(*map(here.get_current_value, reads), *tensors))
        for variable, value in zip(writes, results, strict=False):
            here.add_update((variable, value))
        return next(results), aux_of[-1].of(list(results))

    return reads, replay


def _repeated(
    closed: Any, reads: list[Variable], writes: list[Variable], count: int
) -> tuple[Any, list[Variable]]:
    """A step made into several, one after the other, and what they read."""
    step = jex.jaxpr_as_fun(closed)
    known = {id(v) for v in reads}
    start = [*reads, *(v for v in writes if id(v) not in known)]
    places = {id(v): place for place, v in enumerate(start)}
    written = [places[id(v)] for v in writes]
    size = len(start)

    def steps(*operands: Tensor) -> list[Tensor]:
        def one(new: list[Tensor], batch: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            state = list(operands[:size])
            for place, value in zip(written, new, strict=True):
                state[place] = value
            results = step(*state[: len(reads)], *batch)
            return results[: len(written)], results[len(written) :]

        first = [operands[place] for place in written]
        new, outputs = jax.lax.scan(one, first, list(operands[size:]), length=count)
        return [*new, *outputs]

    arguments = closed.in_avals[len(reads) :]
    shapes = [
        *(_aval(v) for v in start),
        *(jax.ShapeDtypeStruct((count, *a.shape), a.dtype) for a in arguments),
    ]
    return jax.make_jaxpr(steps)(*shapes), start


# Compiling and running ------------------------------------------------------------------------


def _build(
    closed: Any, reads: list[Variable], writes: list[Variable], options: Options
) -> Executable:
    """Compiles a recorded step.

    Inputs are ordered as: state that is read and written, state that is only read, arguments.
    """
    jaxpr = closed.jaxpr
    written = {id(v) for v in writes}
    inputs = dict(zip(map(id, reads), jaxpr.invars, strict=False))
    outputs = dict(zip(map(id, writes), jaxpr.outvars, strict=False))
    changed = [v for v in reads if id(v) in written]
    fixed = [v for v in reads if id(v) not in written]
    # JAX pairs donated inputs with outputs of their shape in the order it finds them. In one order,
    # every variable gets its own buffer back; in another, XLA has to copy most of the state.
    writes = [*changed, *(v for v in writes if id(v) not in inputs)]
    jaxpr = jaxpr.replace(
        invars=[*(inputs[id(v)] for v in (*changed, *fixed)), *jaxpr.invars[len(reads) :]],
        outvars=[*(outputs[id(v)] for v in writes), *jaxpr.outvars[len(writes) :]],
    )
    fun = jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, closed.consts))
    # A callback may raise after it was dispatched. Such a step keeps the old state until its end.
    fallible = _has_callback(jaxpr)
    donated = range(len(changed)) if options.donate and not fallible else ()
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
    compiled = jax.jit(fun, donate_argnums=tuple(donated)).lower(*shapes).compile()
    if fallible:
        return _careful(compiled, [*changed, *fixed], writes)
    return _Lean(_direct_call(compiled), changed, fixed, writes, bool(donated))


def _has_callback(jaxpr: Any) -> bool:
    return any(
        "callback" in e.primitive.name or any(map(_has_callback, jex.jaxprs_in_params(e.params)))
        for e in jaxpr.eqns
    )


def _direct_call(compiled: Any) -> Callable[..., Any]:
    """The compiled program's C++ entry, without the Python around it; itself if there is none."""
    try:
        return compiled._executable.create_cpp_call(compiled._params) or compiled  # type: ignore[no-any-return]
    except AttributeError:
        return compiled  # type: ignore[no-any-return]


# Python's part of a step. One call in C runs the program and stores the new state: Ctrl-C, which
# Python handles between its own instructions, falls before or after the whole of it. What the
# iterator then still holds are the outputs.
_RUN = """
state = list(map(value, old))
{guard}
operands = (*state, *map(value, constant), {leaves})
results = from_iterable(starmap(call, (operands,)))
del state, operands  # nothing holds the old buffers when the program takes them
consume(map(setitem, new, repeat("_value"), results))
outs = list(results)
"""
# A buffer with another owner (a snapshot, a second variable, a NumPy view) is not ours to give
# away: it is copied, and the owner keeps the old one.
_GUARD = """
if max(map(refcount, state)) > alone:
    state = apart(state, list(map(refcount, state)))
"""
# JAX reads NumPy memory later, while the caller may be filling the next batch into it: in place if
# it is aligned; if it is large, even the copy is made on another thread. So it gets a copy of ours,
# aligned, which it takes as it is. For a small array, aligning costs more than a second copy.
_SMALL = 131072  # bytes
_ALIGNMENT = 64


class _Lean:
    """Runs a compiled step on the variables where they are."""

    def __init__(
        self,
        call: Callable[..., Any],
        changed: list[Variable],
        fixed: list[Variable],
        writes: list[Variable],
        donates: bool,
    ) -> None:
        self._guard = _GUARD if donates else ""
        # The variables' own dicts: a third cheaper than attributes, and there are many of them.
        self._names = {
            "call": call,
            "old": _slots(changed),
            "constant": _slots(fixed),
            "new": _slots(writes),
            **_TOOLS,
        }
        text = _RUN.format(guard=self._guard, leaves="*map(settled, leaves)") + "return outs"
        self._run = define("run(leaves)", text, self._names)

    def __call__(self, leaves: Sequence[Any]) -> Sequence[Tensor]:
        return self._run(leaves)  # type: ignore[no-any-return]

    def inline(self, arrays: dict[str, Any]) -> Source:
        """The same for these arguments, to be written into the path of a hit."""
        leaves = [
            name
            if type(x) is not np.ndarray
            else f"{name}.copy()"
            if x.nbytes <= _SMALL
            else f"aligned({name})"
            for name, x in arrays.items()
        ]
        text = _RUN.format(guard=self._guard, leaves=", ".join(leaves))
        return Source(text, self._names)


def _careful(call: Callable[..., Any], state: list[Variable], writes: list[Variable]) -> Executable:
    old, new = _slots(state), _slots(writes)

    def run(leaves: Sequence[Any]) -> list[Tensor]:
        results = iter(jax.block_until_ready(call(*map(_value, old), *leaves)))
        _consume(map(setitem, new, repeat("_value"), results))
        return list(results)

    return run


def _slots(variables: list[Variable]) -> list[dict[str, Any]]:
    """Where variables keep their values."""
    if not all("_value" in v.__dict__ for v in variables):
        raise NotImplementedError(
            "trainstep does not run on Keras's Flax NNX variables; unset KERAS_NNX_ENABLED"
        )
    return [v.__dict__ for v in variables]


def _apart(state: list[Tensor], counts: list[int]) -> list[Tensor]:
    """The buffers, with copies of those that have another owner."""
    pairs = zip(state, counts, strict=True)
    return [jnp.array(x, copy=True) if count > _ALONE else x for x, count in pairs]


def _settled(x: Any) -> Any:
    """An argument that nobody else will write to."""
    if type(x) is not np.ndarray:
        return x
    return x.copy() if x.nbytes <= _SMALL else _aligned(x)


def _aligned(x: Any) -> Any:
    """A copy that JAX takes as it is."""
    memory = np.empty(x.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copy = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def _count_when_alone() -> int:
    """The reference count of a buffer that only its variable holds, as `_GUARD` sees it."""
    slots = [{"_value": object()}]
    state = list(map(_value, slots))
    return max(map(sys.getrefcount, state))


_ALONE = _count_when_alone()
_TOOLS = {
    "aligned": _aligned,
    "alone": _ALONE,
    "apart": _apart,
    "consume": _consume,
    "from_iterable": chain.from_iterable,
    "refcount": sys.getrefcount,
    "repeat": repeat,
    "setitem": setitem,
    "settled": _settled,
    "starmap": starmap,
    "value": _value,
}
