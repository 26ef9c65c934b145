"""JAX's switchboard: the plain way to do a thing, or the trick that does it faster.

The engine asks here and nowhere else, so each trick can be turned off (`shared/switches.py`) or
deleted alone. A recorded step, its variables or its arguments enter; the same leave, arranged so
that XLA or JAX handles them faster. A trick may import `jax`, private parts included, and what the
engine may; nothing but this file imports a trick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trainstep._engines.contract import Taker, Variable, assign_each, plain_taker
from trainstep._engines.jax.inputs import PlainInputs
from trainstep._engines.jax.tricks import (
    cpu_libraries,
    donation,
    input_buffers,
    packed_variables,
    rewrites,
    row_buffers,
)
from trainstep._engines.jax.tricks.packed_variables import Pack as Pack
from trainstep._engines.shared.switches import is_on


def rewritten(closed: Any) -> Any:
    """A jaxpr of the same numbers that XLA runs faster on a CPU."""
    return rewrites.rewritten(closed) if is_on("rewrites") else closed


def compile_lowered(lowered: Any, closed: Any) -> Any:
    """Compiles a step, given as lowered and as a jaxpr."""
    if is_on("cpu_libraries"):
        return cpu_libraries.compile_lowered(lowered, closed)
    return lowered.compile()


def may_donate() -> bool:
    """Whether programs may update variables in place."""
    return is_on("donation")


def atomic_call(compiled: Any) -> Callable[..., Any] | None:
    """Calls a compiled program without running Python, so that no signal falls in between."""
    return donation.atomic_call(compiled) if is_on("donation") else None


def inputs(arguments: Sequence[Any], is_numpy: Sequence[bool]) -> Any:
    """How the arguments of a call become inputs of a program; see `PlainInputs`."""
    if is_on("input_buffers"):
        return input_buffers.InputBuffers(arguments, is_numpy)
    return PlainInputs(arguments)


def row_taker(array: Any) -> Taker:
    """A function that copies the rows of an array at the given places."""
    plain = type(array) is np.ndarray and not array.dtype.hasobject
    if plain and is_on("row_buffers"):
        return row_buffers.RowTaker(array)
    return plain_taker(array)


def pack(variables: Iterable[Variable], kinds: Mapping[int, str]) -> None:
    """Lets small variables share an array; `kinds` names those that may, by id."""
    if is_on("packed_variables"):
        packed_variables.pack(variables, kinds)


def unpack(variables: Iterable[Variable]) -> None:
    """Gives variables arrays of their own again."""
    packed_variables.unpack(variables)


def pack_of(variable: Variable) -> Pack | None:
    """The pack that holds a variable, if any."""
    return packed_variables.pack_of(variable)


def assign(variables: Sequence[Variable], values: Sequence[Any]) -> None:
    """Gives variables values, those of a pack together."""
    if is_on("packed_variables"):
        packed_variables.assign(variables, values)
    else:
        assign_each(variables, values)
