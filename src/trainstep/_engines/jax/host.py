"""JAX: host calls, as a primitive of ours.

    fn, tensors --bind--> an equation --lowered--> the program calls Python, in order

JAX's own `io_callback` puts its arguments on a device first, which can deadlock on a machine with
few cores; it has no derivative, and is dropped from loops that are differentiated. Our primitive
has the ordered effect of `jax.debug.callback`, which JAX never drops, and also returns results.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.interpreters import ad, mlir

from trainstep._engines.contract import Tensor
from trainstep._engines.shared.host_function import Host, HostFunction, Results

_host_p = jex.Primitive("host_callback")
_host_p.multiple_results = True


def host_call(fn: HostFunction, tensors: Sequence[Tensor], results: Results) -> list[Tensor]:
    """Calls `fn` now, or at every run of the program that is being traced."""
    arrays = [jnp.asarray(x) for x in tensors]
    return list(_host_p.bind(*arrays, host=Host(fn), results=tuple(results)))


def hosts_in(jaxpr: Any) -> list[Host]:
    """Returns the host functions that a jaxpr calls, including inner jaxprs."""
    found = [e.params["host"] for e in jaxpr.eqns if e.primitive is _host_p]
    for eqn in jaxpr.eqns:
        for inner in jex.jaxprs_in_params(eqn.params):
            found += hosts_in(inner)
    return found


@cache
def _in_order() -> Any:
    """Returns the effect that keeps host calls, and their order."""
    (effect,) = jax.make_jaxpr(lambda: jax.debug.callback(print, ordered=True))().effects
    return effect


def _at_once(*arrays: Tensor, host: Host, results: Results) -> list[Tensor]:
    return [jnp.asarray(x) for x in host.fn([np.array(x) for x in arrays])]


def _shapes(*avals: Any, host: Host, results: Results) -> tuple[list[Any], set[Any]]:
    return [jax.core.ShapedArray(s, jnp.dtype(d)) for s, d in results], {_in_order()}


def _without_gradient(
    primals: Sequence[Tensor], tangents: Sequence[Any], **params: Any
) -> tuple[list[Tensor], list[Any]]:
    outs = _host_p.bind(*primals, **params)
    return outs, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outs]


def _lowered(ctx: Any, *operands: Any, host: Host, results: Results) -> Any:
    effect = _in_order()
    outs, token, _ = mlir.emit_python_callback(
        ctx,
        host,
        ctx.tokens_in.get(effect),
        list(operands),
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=True,
        returns_token=True,
    )
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({effect: token})))
    return outs


_host_p.def_impl(_at_once)
_host_p.def_effectful_abstract_eval(_shapes)
ad.primitive_jvps[_host_p] = _without_gradient
mlir.register_lowering(_host_p, _lowered, cacheable=False)
