"""Trick: chooses the library that XLA uses for the products and convolutions of a step on a CPU.

JAX 0.10 uses YNNPACK for both by default. YNNPACK is fast for products in loops, with many axes or
of large matrices. Against XLA's own kernels it takes up to three times as long for convolutions,
and a tenth longer for the small products of a dense layer. The option holds for a whole program:
convolutions always use XLA's kernels, products only if all of them are small and plain.

It does not apply on other devices, or if the user has set the option in `XLA_FLAGS`.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable
from typing import Any

import jax
from jax.extend import core as jex

_log = logging.getLogger("trainstep")

_OPTION = "xla_cpu_experimental_ynn_fusion_type"
_SUMS = "LIBRARY_FUSION_TYPE_REDUCE"
_PRODUCTS = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"

# Measured on dense layers of 64 to 2048 units and batches of 32 to 1024 rows.
_LARGEST_PLAIN = 1 << 26  # multiplications and additions of a product
_LOOPS = frozenset(["scan", "while"])


def compile_lowered(lowered: Any, closed: Any) -> Any:
    """Compiles a step, given lowered and as a jaxpr, with the libraries that suit it."""
    options = _options(closed)
    # The user's own setting takes precedence.
    if not options or jax.default_backend() != "cpu" or _OPTION in os.environ.get("XLA_FLAGS", ""):
        return lowered.compile()
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        if _OPTION not in str(error):
            raise
        _log.debug("XLA does not support the choice of libraries for a step: %s", error)
        return lowered.compile()


def _options(closed: Any) -> dict[str, str]:
    """Returns the compiler options, if any."""
    kinds = set(_kinds(closed.jaxpr, in_loop=False))
    if "plain" in kinds and "other" not in kinds:
        return {_OPTION: _SUMS}
    return {_OPTION: f"{_PRODUCTS},{_SUMS}"} if "convolution" in kinds else {}


def _kinds(jaxpr: Any, in_loop: bool) -> Iterable[str]:
    """Yields the kind of each product and convolution."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "conv_general_dilated":
            yield "convolution"
        elif name == "dot_general":
            matrices = all(len(v.aval.shape) <= 2 for v in (*eqn.invars, *eqn.outvars))
            plain = matrices and not in_loop and _product_work(eqn) <= _LARGEST_PLAIN
            yield "plain" if plain else "other"
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from _kinds(inner, in_loop or name in _LOOPS)


def _product_work(eqn: Any) -> float:
    """Returns the number of multiplications and additions of a product."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    sums = math.prod(eqn.outvars[0].aval.shape)
    return float(2 * sums * math.prod(shape[axis] for axis in contracted))
