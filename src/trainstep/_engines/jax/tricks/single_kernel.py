"""JAX: steps that take less time than the way to another thread.

    jaxpr --small?--> one kernel, run by the thread that calls it
                  --> dozens of them, run by XLA's threads, as ever

XLA compiles a step to dozens of kernels, which its threads share, and hands each call to one of
them. On a small network that is most of the time: a thread that sleeps takes longer to wake up
than the whole step to compute. XLA has another way for small loops, which are one kernel
(`xla_cpu_small_call`), and one for programs that call the host, which the calling thread runs. A
small step goes both: it is called as such a loop would be, and loaded with a function on the host
that it never calls. What XLA cannot compile so is compiled as ever.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core as jex

from trainstep._engines.contract import Tensor
from trainstep._engines.jax.tricks.cpu_libraries import NO_LIBRARY, product_work

_log = logging.getLogger("trainstep")

# Measured on networks of one to twelve layers, see `benchmarks.compare`: a larger step gains from
# XLA's threads and its libraries, and one of more equations compiles longer than otherwise.
_WORK = 1 << 17  # multiplications and additions
_EQUATIONS = 400
_OPERANDS = 48  # from some sixty on, a call of a kernel takes ever longer for each of them

# The kernel is written by an older part of XLA, which knows less. These it knows, and by them it
# gives the numbers of the other, but for the order of a sum.
_KNOWN = frozenset(
    " ".join(
        (
            "abs add add_any and argmax argmin bitcast_convert_type broadcast_in_dim ceil clamp",
            "concatenate convert_element_type copy copy_p cos cumsum div dot_general eq erf",
            "erf_inv erfc exp exp2 expm1 floor ge gt integer_pow iota is_finite le log log1p",
            "logistic lt max min mul ne neg not or pad pow random_bits random_fold_in",
            "random_unwrap random_wrap reduce_and reduce_max reduce_min reduce_or reduce_prod",
            "reduce_sum rem reshape rev round rsqrt select_n shift_left shift_right_arithmetic",
            "shift_right_logical sign sin slice split sqrt square squeeze stop_gradient sub tan",
            "stack tanh threefry2x32 transpose xor",
        )
    ).split()
)
_CALLS = frozenset(["jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"])


def is_small(closed: Any, repeat: int = 0) -> bool:
    """Whether a step, or so many of them, are shorter than the way to another thread."""
    jaxpr = closed.jaxpr
    works = [*_works(jaxpr), *(float(_size(v)) for v in jaxpr.outvars)]
    return (
        len(works) <= _EQUATIONS
        and len(jaxpr.invars) <= _OPERANDS
        and sum(works) * max(repeat, 1) <= _WORK
        and bool(jaxpr.invars and jaxpr.outvars)
        and all(v.aval.dtype in _DTYPES and _size(v) for v in jaxpr.invars)
    )


def _works(jaxpr: Any) -> Iterable[float]:
    """Of each equation, how much it computes; without bound if it is not known."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _CALLS:
            # A function with a derivative of its own holds the rule for it, too, but as no jaxpr.
            for inner in jex.jaxprs_in_params(eqn.params):
                yield from _works(inner)
        elif name not in _KNOWN or not all(map(_is_plain, (*eqn.invars, *eqn.outvars))):
            yield math.inf
        elif name == "dot_general":
            yield product_work(eqn)
        else:
            yield float(max(map(_size, (*eqn.invars, *eqn.outvars)), default=0))


def _size(v: Any) -> int:
    return math.prod(v.aval.shape)


def _is_plain(v: Any) -> bool:
    """Whether a value is of a type that all of XLA computes with."""
    dtype = getattr(v.aval, "dtype", None)
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) or dtype in _DTYPES


_DTYPES = frozenset(map(np.dtype, ["bool", "int32", "uint32", "float32"]))


def as_one_kernel(fun: Callable[..., Sequence[Tensor]]) -> Callable[..., Sequence[Tensor]]:
    """A function that calls this one as XLA calls small loops of its own.

    It has one more result, of a bit of every operand: XLA ends the process if, once it has
    simplified the kernel, there is an operand that nothing uses.
    """

    def used(*operands: Tensor) -> list[Tensor]:
        return [*fun(*operands), functools.reduce(lax.bitwise_xor, map(_word, operands))]

    inner = jax.jit(used)

    def called(*operands: Tensor) -> list[Tensor]:
        first, *others = inner(*operands)
        return [set_xla_metadata(first, inlineable="false", xla_cpu_small_call="true"), *others]

    return called


def _word(x: Tensor) -> Tensor:
    """The first of the numbers of an array, as bits."""
    first = lax.reshape(lax.slice(x, [0] * x.ndim, [1] * x.ndim), ())
    if first.dtype == np.bool_:
        return lax.convert_element_type(first, np.uint32)
    return lax.bitcast_convert_type(first, np.uint32)


def compiled_small(lowered: Any, *, at_once: bool) -> Any | None:
    """Compiles such a function.

    Args:
        lowered: The function, lowered.
        at_once: Whether the thread that calls runs it.

    Returns:
        What `lowered.compile()` does; None if XLA cannot.
    """
    try:
        if at_once:
            arguments = lowered._lowering.compile_args
            arguments["backend"] = _at_once(arguments["backend"])
        # XLA's libraries of kernels cannot be called from within one.
        return lowered.compile(NO_LIBRARY)
    except _CANNOT as error:
        _log.debug("a small step is compiled as others are: %s", error)
        return None


# An operation in a form that is not known; or a JAX whose private parts are others.
_CANNOT = (jax.errors.JaxRuntimeError, AttributeError, KeyError, TypeError)


class _AtOnce:
    """A client of JAX's whose programs are run by the thread that calls."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def compile_and_load(self, *args: Any, **kwargs: Any) -> Any:
        return self._client.compile_and_load(*args, **kwargs, host_callbacks=[_never])

    def deserialize_executable(self, *args: Any, **kwargs: Any) -> Any:
        return self._client.deserialize_executable(*args, **kwargs, host_callbacks=[_never])


_at_once = functools.cache(_AtOnce)


def _never(*_: Any) -> None:
    raise AssertionError("no program calls this")
