"""JAX: records a step as a jaxpr whose inputs are the variables that the step reads.

The user's Python runs once. When it reads a variable, our primitive `variable` is bound at the top
of the trace; afterwards the results of these equations become inputs of the jaxpr. So the variables
need not be known in advance, and a model that builds itself in the step needs no second trace.
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
from trainstep._engines.jax.private import shape_poly
from trainstep._engines.jax.symbolic_sizes import (
    Assumptions,
    assuming,
    needs_concrete_size,
    symbolic,
)
from trainstep._state.outputs import take_out
from trainstep._state.scopes import Recorder, Recording, current_scope

_variable_p = jex.Primitive("variable")
_variable_p.def_abstract_eval(lambda *, index, aval: aval)


def is_tensor(x: Any) -> bool:
    """Whether JAX computes with `x` without conversion."""
    # A symbolic size is a number at run time.
    return isinstance(x, (jax.Array, np.ndarray, np.generic)) or jax.export.is_symbolic_dim(x)


def record(scope: Recording, step: Step, leaves: Sequence[Any]) -> Any:
    """Traces `step` in a scope; returns a closed jaxpr whose first inputs are the scope's reads.

    Its outputs are the new values of the scope's writes, then the outputs of the step.
    """

    def pure(*tensors: Tensor) -> list[Tensor]:
        trace = scope.home = scope.current_graph()

        def lift(variable: Variable) -> Tensor:
            # At the top of this trace, even if a loop body reads it: the body captures the value.
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
        debug_info=_with_unnamed(jaxpr.debug_info, len(scope.reads)),
    )
    return jex.ClosedJaxpr(jaxpr, closed.consts)


def trace_dynamic_sizes(
    step: Step, leaves: Sequence[Any], recorder: Recorder, options: Options, axes: Axes
) -> Traced:
    """Records a step with symbols for its dynamic sizes."""
    if shape_poly is None:
        raise Refused(f"JAX {jax.__version__} lacks what trainstep needs for that")
    stand_ins, sizes = symbolic(leaves, axes)
    assumptions = Assumptions(sizes)
    try:
        with recorder, assuming(assumptions):
            closed = record(recorder, step, stand_ins)
    except Exception as error:
        if needs_concrete_size(error):
            raise Refused("Python needs a dynamic size as a number") from error
        raise
    reads, writes = list(recorder.reads.values()), list(recorder.writes.values())
    packable = dict(recorder.packable)
    check_state(closed, writes)

    def build_for(compiler: str, bucket: Sizes | None = None) -> Executable:
        return build_bucket(
            closed, reads, writes, options, axes=axes, sizes=bucket or sizes, packable=packable
        )

    return Traced(reads, writes, build_for, violated_assumption=assumptions.violated_assumption)


def _with_unnamed(info: Any, count: int) -> Any:
    """Returns JAX's names of the inputs, preceded by empty names for the variables."""
    return info._replace(arg_names=("",) * count + (info.arg_names or ()))


def _aval(variable: Variable) -> Any:
    value = variable._value
    dtype = jax.dtypes.canonicalize_dtype(variable._dtype) if value is None else value.dtype
    return jax.core.ShapedArray(tuple(variable.shape), dtype)


def replayable(
    call: Loss, leaves: Sequence[Tensor], place: Callable[[], Any]
) -> tuple[list[Variable], Loss]:
    """Records `call`; returns the variables that it reads, and a function that replays it."""
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
