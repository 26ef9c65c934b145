"""JAX: equations of a recorded step, replaced by others that XLA runs faster on a CPU.

    jaxpr --each equation: a rule gives other equations, or leaves it--> jaxpr of the same numbers

XLA's compiler for CPUs is good at some forms of an operation and bad at others, and what Keras and
differentiation write is sometimes of the bad kind. A rule knows one such form. It gives the same
numbers for all inputs, except that a sum may be taken in another order, and where it is not sure
it leaves the equation alone.
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

# Equations whose parameters hold jaxprs of plain equations. There are others, whose inside has
# rules of its own (kernels, manual sharding).
_CALLS = ("jit", "pjit", "closed_call", "remat2", "checkpoint")
_OUTER = {*_CALLS, "scan", "while", "cond", "custom_jvp_call", "custom_vjp_call"}
_LARGEST = 16  # elements of a window; the equations of a larger one are too many

Rule = Callable[[Any], Callable[..., Tensor] | None]


def rewritten(closed: Any) -> Any:
    """A closed jaxpr that computes the same, faster on a CPU."""
    return jex.ClosedJaxpr(_Rewriting().jaxpr(closed.jaxpr), closed.consts)


class _Rewriting:
    """One pass over a jaxpr and those inside it. What occurs often is rewritten once."""

    def __init__(self) -> None:
        self._done: dict[int, Any] = {}

    def jaxpr(self, jaxpr: Any) -> Any:
        """The jaxpr, or itself if nothing in it changes."""
        if id(jaxpr) not in self._done:
            before = jaxpr.eqns
            after = [new for eqn in _turned(jaxpr) for new in self._equations(eqn)]
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
    """The equations of a function, between the inputs and the output of an equation."""
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
# XLA has no kernel for its gradient: it finds the place of each maximum with a reduction over four
# arrays of indices, and scatters. That takes as long as the rest of a small convnet. Where windows
# do not overlap, the corners of all windows are compared as whole arrays.


def _pooling_gradient(eqn: Any) -> Callable[..., Tensor] | None:
    params, window = eqn.params, eqn.params["window_dimensions"]
    if (
        tuple(params["window_strides"]) != tuple(window)
        or any(map(any, params["padding"]))
        or not 1 < math.prod(window) <= _LARGEST
        or not _is_plain(eqn)
    ):
        return None
    return lambda slopes, x: _to_winners(slopes, x, window, params["select_prim"])


def _to_winners(slopes: Tensor, x: Tensor, window: Sequence[int], select: Any) -> Tensor:
    """Sends the slope of each window to the element that was selected there."""
    covered = [count * size for count, size in zip(slopes.shape, window, strict=True)]
    split = [
        part for count, size in zip(slopes.shape, window, strict=True) for part in (count, size)
    ]
    blocks = lax.reshape(lax.slice(x, [0] * x.ndim, covered), split)
    inner = range(1, blocks.ndim, 2)  # the axes inside a window
    corners = []
    for place in itertools.product(*map(range, window)):
        start, stop = [0] * blocks.ndim, list(split)
        for axis, index in zip(inner, place, strict=True):
            start[axis], stop[axis] = index, index + 1
        corners.append(lax.squeeze(lax.slice(blocks, start, stop), inner))
    # As XLA goes over a window: the one it has stays if `select` says so, which no NaN does.
    best, beaten = corners[0], []
    for corner in corners[1:]:
        better = lax.bitwise_not(select.bind(best, corner))
        beaten.append(better)
        best = lax.select(better, corner, best)
    zeros = lax.full_like(slopes, 0)
    rest, parts = slopes, []  # the slopes of the windows whose winner is not found yet
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
# A sum of a product with something broadcast is ten times slower if there is an axis of size one,
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
    """Whether an equation is in float32, where there is something to win, and not laid out."""
    types = {v.aval.dtype for v in (*eqn.invars, *eqn.outvars)}
    return types == {jnp.dtype("float32")} and eqn.params.get("out_sharding") is None


# Products for weights -------------------------------------------------------------------------
# The gradient of a kernel that was applied to sequences is recorded as a product that sums over
# two axes, then turned round. XLA makes one product of both, with both operands the wrong way
# for its fast kernel. Recorded as a product of the other order, it has only one to turn.


def _turned(jaxpr: Any) -> list[Any]:
    """The equations, with each product that is turned round made in the other order."""
    uses = Counter(
        v
        for v in itertools.chain(jaxpr.outvars, *(eqn.invars for eqn in jaxpr.eqns))
        if not isinstance(v, jex.Literal)
    )
    products = {
        eqn.outvars[0]: eqn
        for eqn in jaxpr.eqns
        if eqn.primitive is lax.dot_general_p and uses[eqn.outvars[0]] == 1 and _sums_over_two(eqn)
    }
    replaced: dict[int, Any] = {}
    for eqn in jaxpr.eqns:
        product = products.get(eqn.invars[0]) if eqn.primitive is lax.transpose_p else None
        if product is not None and _turns_round(eqn, product):
            replaced[id(product)] = None
            replaced[id(eqn)] = _in_other_order(product, eqn.outvars)
    equations = (replaced.get(id(eqn), eqn) for eqn in jaxpr.eqns)
    return [eqn for eqn in equations if eqn is not None]


def _in_other_order(product: Any, outvars: Sequence[Any]) -> Any:
    (left, right), batch = product.params["dimension_numbers"]
    params = {**product.params, "dimension_numbers": ((right, left), batch)}
    return product.replace(invars=product.invars[::-1], outvars=outvars, params=params)


def _sums_over_two(eqn: Any) -> bool:
    (left, _), (batch, _) = eqn.params["dimension_numbers"]
    precision = eqn.params["precision"]
    one = precision is None or (isinstance(precision, tuple) and len(set(precision)) == 1)
    return len(left) > 1 and not batch and one and _is_plain(eqn)


def _turns_round(eqn: Any, product: Any) -> bool:
    """Whether all axes of the left operand come to stand behind those of the right one."""
    (left, _), _ = product.params["dimension_numbers"]
    first = product.invars[0].aval.ndim - len(left)
    total = product.outvars[0].aval.ndim
    return tuple(eqn.params["permutation"]) == (*range(first, total), *range(first))


_RULES: dict[str, Rule] = {
    "select_and_scatter_add": _pooling_gradient,
    "reduce_sum": _sum_without_units,
}
