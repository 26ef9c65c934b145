"""Rules for operations with inner jaxprs (calls, loops, branches), and for host calls."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from trainstep._engines.jax.masking.bucket import Tensor, dynamic_axes, is_dynamic
from trainstep._engines.jax.masking.evaluate import Equation, evaluate_closed, rule


@rule("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint")
def _call(e: Equation) -> list[Tensor]:
    return evaluate_closed(e.bucket, e.params.get("jaxpr") or e.params["call_jaxpr"], e.operands)


@rule("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
def _custom(e: Equation) -> list[Tensor]:
    # Gradients are already part of the jaxpr, so only the function itself matters.
    inner = e.params.get("call_jaxpr") or e.params["fun_jaxpr"]
    return evaluate_closed(e.bucket, inner, e.operands)


@rule("scan")
def _scan(e: Equation) -> list[Tensor]:
    """A loop over an axis; iterations beyond its true end do not change the carry."""
    consts, carries = e.params["num_consts"], e.params["num_carry"]
    length, body = e.params["length"], e.params["jaxpr"]
    fixed, init = e.operands[:consts], e.operands[consts : consts + carries]
    names = set(primitives(body.jaxpr)) if is_dynamic(length) else set()
    if any("callback" in name for name in names):
        raise e.refuse("with a callback, over an axis of dynamic size, has no rule")

    def turn(carry: list[Tensor], each: Any) -> tuple[list[Tensor], list[Tensor]]:
        place, xs = each
        counts = place < e.bucket.true(length) if is_dynamic(length) else True
        if "while" in names:  # an inner loop might not terminate on padding
            return lax.cond(counts, run, skip, carry, xs)  # type: ignore[no-any-return]
        new, ys = run(carry, xs)
        if is_dynamic(length):
            new = [jnp.where(counts, a, b) for a, b in zip(new, carry, strict=True)]
        return new, ys

    def run(carry: list[Tensor], xs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        results = evaluate_closed(e.bucket, body, [*fixed, *carry, *xs])
        return results[:carries], results[carries:]

    def skip(carry: list[Tensor], xs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        avals = body.out_avals[carries:]
        return carry, [jnp.zeros(e.bucket.shape(a.shape), a.dtype) for a in avals]

    count = e.bucket.padded(length)
    carry, ys = lax.scan(
        turn,
        [jnp.asarray(x) for x in init],
        (jnp.arange(count), e.operands[consts + carries :]),
        length=count,
        reverse=e.params["reverse"],
        unroll=e.params["unroll"],
    )
    return [*carry, *ys]


def primitives(jaxpr: Any) -> Iterator[str]:
    """Yields the names of all primitives in a jaxpr, including inner jaxprs."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from primitives(inner)


@rule("while")
def _while(e: Equation) -> list[Tensor]:
    conds, bodies = e.params["cond_nconsts"], e.params["body_nconsts"]
    of_cond, of_body = e.operands[:conds], e.operands[conds : conds + bodies]

    def goes_on(carry: list[Tensor]) -> Tensor:
        return evaluate_closed(e.bucket, e.params["cond_jaxpr"], [*of_cond, *carry])[0]

    def turn(carry: list[Tensor]) -> list[Tensor]:
        return evaluate_closed(e.bucket, e.params["body_jaxpr"], [*of_body, *carry])

    init = [jnp.asarray(x) for x in e.operands[conds + bodies :]]
    return lax.while_loop(goes_on, turn, init)  # type: ignore[no-any-return]


@rule("cond")
def _branch(e: Equation) -> list[Tensor]:
    index, *operands = e.operands
    branches = [partial(_run, e, branch) for branch in e.params["branches"]]
    return lax.switch(index, branches, *operands)  # type: ignore[no-any-return]


def _run(e: Equation, branch: Any, *operands: Tensor) -> list[Tensor]:
    return evaluate_closed(e.bucket, branch, operands)


@rule("host_callback")
def _host(e: Equation) -> list[Tensor]:
    """A host call; the padding is removed on the host."""
    sizes = [e.bucket.true(dim) for shape in e.shapes for dim in shape if is_dynamic(dim)]
    host = e.params["host"].without_padding([dynamic_axes(shape) for shape in e.shapes])
    return e.bind(*e.operands, *sizes, host=host)  # type: ignore[no-any-return]
