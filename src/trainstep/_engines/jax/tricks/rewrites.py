"""Trick: replaces equations of a recorded step by others that XLA runs faster on a CPU.

    jaxpr --each equation: a rule returns other equations, or keeps it--> equivalent jaxpr

XLA's CPU compiler is fast for some forms of an operation and slow for others, and Keras and
differentiation sometimes produce a slow one. A rule replaces one such form: gradients of max
pooling, sums over axes of size 1, weight gradients over sequences. Results are the same for all
inputs, up to the order of sums.

It does not apply on other devices, nor where the conditions of a rule are not met: the equation
stays.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from trainstep._engines.contract import Tensor

# Equations whose parameters hold jaxprs of plain equations. Inner jaxprs of others (kernels, manual
# sharding) have different semantics.
_CALLS = ("jit", "pjit", "closed_call", "remat2", "checkpoint")
_OUTER = {*_CALLS, "scan", "while", "cond", "custom_jvp_call", "custom_vjp_call"}
_LARGEST = 16  # elements of a window; a larger one would need too many equations

Rule = Callable[[Any], Callable[..., Tensor] | None]


def rewritten(closed: Any) -> Any:
    """Returns an equivalent closed jaxpr that is faster on a CPU."""
    return jex.ClosedJaxpr(_Rewriting().jaxpr(closed.jaxpr), closed.consts)


class _Rewriting:
    """One pass over a jaxpr and its inner jaxprs. A jaxpr that occurs often is rewritten once."""

    def __init__(self) -> None:
        self._done: dict[int, Any] = {}

    def jaxpr(self, jaxpr: Any) -> Any:
        """Returns the rewritten jaxpr; the jaxpr itself if nothing changes."""
        if id(jaxpr) not in self._done:
            before = jaxpr.eqns
            after = [new for eqn in _with_swapped_products(jaxpr) for new in self._equations(eqn)]
            same = len(after) == len(before) and all(map(_is, after, before))
            self._done[id(jaxpr)] = jaxpr if same else jaxpr.replace(eqns=after)
        return self._done[id(jaxpr)]

    def _equations(self, eqn: Any) -> list[Any]:
        if eqn.primitive.name in _OUTER:
            params = {name: self._parameter(value) for name, value in eqn.params.items()}
            if all(params[name] is value for name, value in eqn.params.items()):
                return [eqn]
            return [eqn.replace(params=params)]
        rule = _RULES.get(eqn.primitive.name)
        if rule is None or isinstance(eqn.outvars[0], jex.DropVar):
            return [eqn]
        function = rule(eqn)
        return [eqn] if function is None else _spliced(eqn, function)

    def _parameter(self, value: Any) -> Any:
        if isinstance(value, jex.Jaxpr):
            return self.jaxpr(value)
        if isinstance(value, jex.ClosedJaxpr):
            inner = self.jaxpr(value.jaxpr)
            return value if inner is value.jaxpr else jex.ClosedJaxpr(inner, value.consts)
        if isinstance(value, tuple):
            parts = tuple(map(self._parameter, value))
            return value if all(map(_is, parts, value)) else parts
        return value


def _is(a: Any, b: Any) -> bool:
    return a is b


def _spliced(eqn: Any, function: Callable[..., Tensor]) -> list[Any]:
    """Returns the equations of a function, connected to the inputs and output of an equation."""
    given = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    jaxpr = jax.make_jaxpr(function)(*given).jaxpr
    (result,) = jaxpr.outvars
    names = {**dict(zip(jaxpr.invars, eqn.invars, strict=True)), result: eqn.outvars[0]}

    def outer(v: Any) -> Any:
        return v if isinstance(v, jex.Literal) else names.get(v, v)

    return [
        each.replace(
            invars=list(map(outer, each.invars)),
            outvars=list(map(outer, each.outvars)),
            source_info=eqn.source_info,
            ctx=eqn.ctx,
        )
        for each in jaxpr.eqns
    ]


# Max pooling ----------------------------------------------------------------------------------
# XLA has no kernel for its gradient: it locates each maximum by a reduction over four index arrays,
# and scatters. That takes as long as the rest of a small convnet. Where windows do not overlap,
# each position of all windows is one array, and these arrays are compared elementwise.


def _pooling_gradient(eqn: Any) -> Callable[..., Tensor] | None:
    params, window = eqn.params, eqn.params["window_dimensions"]
    if (
        tuple(params["window_strides"]) != tuple(window)
        or any(map(any, params["padding"]))
        or not 1 < math.prod(window) <= _LARGEST
        or not _is_plain(eqn)
    ):
        return None
    return lambda gradients, x: _to_selected(gradients, x, window, params["select_prim"])


def _to_selected(gradients: Tensor, x: Tensor, window: Sequence[int], select: Any) -> Tensor:
    """Routes the gradient of each window to its selected element."""
    covered = [count * size for count, size in zip(gradients.shape, window, strict=True)]
    split = [
        part for count, size in zip(gradients.shape, window, strict=True) for part in (count, size)
    ]
    blocks = lax.reshape(lax.slice(x, [0] * x.ndim, covered), split)
    inner = range(1, blocks.ndim, 2)  # the axes inside a window
    corners = []
    for place in itertools.product(*map(range, window)):
        start, stop = [0] * blocks.ndim, list(split)
        for axis, index in zip(inner, place, strict=True):
            start[axis], stop[axis] = index, index + 1
        corners.append(lax.squeeze(lax.slice(blocks, start, stop), inner))
    # In XLA's order over a window: the current element stays if `select` is true, as for no NaN.
    best, beaten = corners[0], []
    for corner in corners[1:]:
        better = lax.bitwise_not(select.bind(best, corner))
        beaten.append(better)
        best = lax.select(better, corner, best)
    zeros = lax.full_like(gradients, 0)
    rest, parts = gradients, []  # gradients of windows whose selected element is not found yet
    for better in reversed(beaten):
        parts.append(lax.select(better, rest, zeros))
        rest = lax.select(better, zeros, rest)
    parts = [lax.expand_dims(part, inner) for part in (rest, *reversed(parts))]
    for axis in reversed(inner):  # the last axis of a window runs fastest
        size = split[axis]
        parts = [
            lax.concatenate(parts[first : first + size], axis)
            for first in range(0, len(parts), size)
        ]
    whole = lax.reshape(parts[0], covered)
    beyond = [(0, size - part, 0) for size, part in zip(x.shape, covered, strict=True)]
    return lax.pad(whole, jnp.zeros((), whole.dtype), beyond)


# Axes of size one -----------------------------------------------------------------------------
# A sum of a product with a broadcast operand is ten times slower if there is an axis of size one,
# as in the softmax of JAX's attention.


def _sum_without_units(eqn: Any) -> Callable[..., Tensor] | None:
    (aval,), params = (v.aval for v in eqn.invars), eqn.params
    kept = [axis for axis, size in enumerate(aval.shape) if size != 1]
    if len(kept) == aval.ndim or not _is_plain(eqn):
        return None
    shape = [aval.shape[axis] for axis in kept]
    axes = tuple(kept.index(axis) for axis in params["axes"] if axis in kept)
    result = eqn.outvars[0].aval.shape

    def summed(x: Tensor) -> Tensor:
        x = lax.reshape(x, shape)
        if axes:
            x = eqn.primitive.bind(x, **{**params, "axes": axes})
        return lax.reshape(x, result)

    return summed


def _is_plain(eqn: Any) -> bool:
    """Whether an equation has only float32 (other dtypes gain nothing) and no sharding."""
    types = {v.aval.dtype for v in (*eqn.invars, *eqn.outvars)}
    return types == {jnp.dtype("float32")} and eqn.params.get("out_sharding") is None


# Weight gradients over sequences --------------------------------------------------------------
# The gradient of a kernel that is applied to sequences is a product that contracts two axes, then a
# transpose. XLA fuses both into one product whose operands must both be transposed for its fast
# kernel. With swapped operands, only one of them must be.


def _with_swapped_products(jaxpr: Any) -> list[Any]:
    """Returns the equations; transposed products become products with swapped operands."""
    uses = Counter(
        v
        for v in itertools.chain(jaxpr.outvars, *(eqn.invars for eqn in jaxpr.eqns))
        if not isinstance(v, jex.Literal)
    )
    products = {
        eqn.outvars[0]: eqn
        for eqn in jaxpr.eqns
        if eqn.primitive is lax.dot_general_p
        and uses[eqn.outvars[0]] == 1
        and _contracts_several(eqn)
    }
    replaced: dict[int, Any] = {}
    for eqn in jaxpr.eqns:
        product = products.get(eqn.invars[0]) if eqn.primitive is lax.transpose_p else None
        if product is not None and _swaps_operands(eqn, product):
            replaced[id(product)] = None
            replaced[id(eqn)] = _swapped(product, eqn.outvars)
    equations = (replaced.get(id(eqn), eqn) for eqn in jaxpr.eqns)
    return [eqn for eqn in equations if eqn is not None]


def _swapped(product: Any, outvars: Sequence[Any]) -> Any:
    (left, right), batch = product.params["dimension_numbers"]
    params = {**product.params, "dimension_numbers": ((right, left), batch)}
    return product.replace(invars=product.invars[::-1], outvars=outvars, params=params)


def _contracts_several(eqn: Any) -> bool:
    (left, _), (batch, _) = eqn.params["dimension_numbers"]
    precision = eqn.params["precision"]
    one = precision is None or (isinstance(precision, tuple) and len(set(precision)) == 1)
    return len(left) > 1 and not batch and one and _is_plain(eqn)


def _swaps_operands(eqn: Any, product: Any) -> bool:
    """Whether a transpose moves all axes of the left operand behind those of the right one."""
    (left, _), _ = product.params["dimension_numbers"]
    first = product.invars[0].aval.ndim - len(left)
    total = product.outvars[0].aval.ndim
    return tuple(eqn.params["permutation"]) == (*range(first, total), *range(first))


_RULES: dict[str, Rule] = {
    "select_and_scatter_add": _pooling_gradient,
    "reduce_sum": _sum_without_units,
}
