"""JAX's record of a step: a jaxpr whose inputs are the variables that the step read.

The user's Python runs once. A variable read while tracing is bound as an equation of a primitive
of ours at the top of the trace; afterwards those equations' results become inputs of the jaxpr.
So variables need not be known beforehand, and a model that builds itself costs no second trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from trainstep._engines.contract import (
    Axes,
    Executable,
    Loss,
    Options,
    Refused,
    Sizes,
    Step,
    Tensor,
    Traced,
    Variable,
)
from trainstep._engines.jax.bucket_program import build_bucket, check_state
from trainstep._engines.jax.symbolic_sizes import Assumptions, assuming, needs_a_number, symbolic
from trainstep._state.outputs import take_out
from trainstep._state.scopes import Recorder, Recording, current_scope

_variable_p = jex.Primitive("variable")
_variable_p.def_abstract_eval(lambda *, index, aval: aval)


def is_tensor(x: Any) -> bool:
    """Whether JAX computes with `x` as it is."""
    # A size that varies is a number when the program runs.
    return isinstance(x, (jax.Array, np.ndarray, np.generic)) or jax.export.is_symbolic_dim(x)


def record(scope: Recording, step: Step, leaves: Sequence[Any]) -> Any:
    """Traces `step` in a scope; returns a closed jaxpr whose first inputs are the scope's reads.

    Its outputs are the new values of the scope's writes, then those of the step.
    """

    def pure(*tensors: Tensor) -> list[Tensor]:
        trace = scope.home = scope.current_graph()

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


def trace_sizes(
    step: Step, leaves: Sequence[Any], recorder: Recorder, options: Options, axes: Axes
) -> Traced:
    """Records a step with symbols for the sizes that vary."""
    stand_ins, sizes = symbolic(leaves, axes)
    assumptions = Assumptions(sizes)
    try:
        with recorder, assuming(assumptions):
            closed = record(recorder, step, stand_ins)
    except Exception as error:
        if needs_a_number(error):
            raise Refused("Python needs a size that varies as a number") from error
        raise
    reads, writes = list(recorder.reads.values()), list(recorder.writes.values())
    packable = dict(recorder.packable)
    check_state(closed, writes)

    def build_for(compiler: str, bucket: Sizes | None = None) -> Executable:
        return build_bucket(
            closed, reads, writes, options, axes=axes, sizes=bucket or sizes, packable=packable
        )

    return Traced(reads, writes, build_for, violated_assumption=assumptions.violated_assumption)


def _unnamed(info: Any, count: int) -> Any:
    """JAX's names of the inputs, with empty ones for the variables in front."""
    return info._replace(arg_names=("",) * count + (info.arg_names or ()))


def _aval(variable: Variable) -> Any:
    value = variable._value
    dtype = jax.dtypes.canonicalize_dtype(variable._dtype) if value is None else value.dtype
    return jax.core.ShapedArray(tuple(variable.shape), dtype)


def replayable(
    call: Loss, leaves: Sequence[Tensor], place: Callable[[], Any]
) -> tuple[list[Variable], Loss]:
    """The variables that `call` reads, and an equivalent of it that runs no Python again."""
    scope = Recording(place)
    aux_of: list[Any] = []

    def step(tensors: Sequence[Tensor]) -> list[Tensor]:
        value, aux = call(tensors)
        aux_tensors, build = take_out(aux, is_tensor, ())
        aux_of.append(build)
        return [value, *aux_tensors]

    with scope:
        run = jex.jaxpr_as_fun(record(scope, step, leaves))
    reads, writes = list(scope.reads.values()), list(scope.writes.values())

    def replay(tensors: Sequence[Tensor]) -> tuple[Tensor, Any]:
        here = current_scope()
        results = iter(run(*map(here.get_current_value, reads), *tensors))
        for variable, value in zip(writes, results, strict=False):
            here.add_update((variable, value))
        return next(results), aux_of[-1].of(list(results))

    return reads, replay
