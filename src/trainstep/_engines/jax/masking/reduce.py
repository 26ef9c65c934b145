"""Rules for operations that combine positions: reductions, cumulative operations, sorting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from trainstep._engines.jax.masking.bucket import Tensor, is_dynamic
from trainstep._engines.jax.masking.evaluate import Equation, Rule, rule

Neutral = Callable[[Any], Any]  # returns the neutral value of a dtype


def zero(dtype: Any) -> Any:
    """Returns the neutral value of a sum."""
    return 0


def one(dtype: Any) -> Any:
    """Returns the neutral value of a product."""
    return 1


def lowest(dtype: Any) -> Any:
    """Returns the neutral value of a maximum."""
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf
    return False if dtype == jnp.bool_ else jnp.iinfo(dtype).min


def highest(dtype: Any) -> Any:
    """Returns the neutral value of a minimum."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.inf
    return True if dtype == jnp.bool_ else jnp.iinfo(dtype).max


def _all_bits(dtype: Any) -> Any:
    return True if dtype == jnp.bool_ else ~jnp.zeros((), dtype)


def _reduction(neutral: Neutral) -> Rule:
    def reduce(e: Equation) -> Tensor:
        return e.bind(e.filled(0, e.params["axes"], neutral(e.operands[0].dtype)))

    return reduce


def _running(neutral: Neutral) -> Rule:
    def accumulate(e: Equation) -> Tensor:
        # Forwards, a true position depends on true positions only.
        axes = [e.params["axis"]] if e.params["reverse"] else []
        return e.bind(e.filled(0, axes, neutral(e.operands[0].dtype)))

    return accumulate


for _names, _neutral in (
    (("reduce_sum",), zero),
    (("reduce_prod",), one),
    (("reduce_max", "argmax"), lowest),
    (("reduce_min", "argmin"), highest),
    (("reduce_or", "reduce_xor"), zero),
    (("reduce_and",), _all_bits),
):
    rule(*_names)(_reduction(_neutral))
for _names, _neutral in (
    (("cumsum",), zero),
    (("cumprod",), one),
    (("cummax", "cumlogsumexp"), lowest),
    (("cummin",), highest),
):
    rule(*_names)(_running(_neutral))


@rule("sort")
def _sort(e: Equation) -> list[Tensor]:
    axis = e.params["dimension"]
    if not is_dynamic(e.shapes[0][axis]):
        return e.bind(*e.operands)  # type: ignore[no-any-return]
    # An additional first key sorts the padding last, whatever its values.
    beyond = jnp.logical_not(e.bucket.valid(e.shapes[0], [axis])).astype(jnp.int32)
    beyond = jnp.broadcast_to(beyond, e.operands[0].shape)
    keys = e.params["num_keys"] + 1
    return list(lax.sort((beyond, *e.operands), dimension=axis, is_stable=True, num_keys=keys)[1:])


@rule("top_k")
def _top_k(e: Equation) -> list[Tensor]:
    axis = e.params.get("axis", len(e.shapes[0]) - 1)
    k = e.params["k"]
    if is_dynamic(k):
        raise e.refuse("with a dynamic `k` has no rule")
    return e.bind(e.filled(0, [axis], lowest(e.operands[0].dtype)))  # type: ignore[no-any-return]
