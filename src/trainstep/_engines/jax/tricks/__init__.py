"""JAX's switchboard: calls a trick, or its fallback.

The engine reaches tricks only through this file, so each can be turned off (`shared/switches.py`)
or deleted alone. A recorded step, its variables or its arguments enter; equivalent ones leave,
which XLA or JAX handles faster. A trick may import `jax`, private parts included, and whatever the
engine may import; only this file imports tricks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trainstep._engines.contract import Taker, Variable, assign_each, plain_taker
from trainstep._engines.jax import private
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
    """Returns an equivalent jaxpr that XLA runs faster on a CPU."""
    return rewrites.rewritten(closed) if is_on("rewrites") else closed


def compile_lowered(lowered: Any, closed: Any) -> Any:
    """Compiles a step, given lowered and as a jaxpr."""
    if is_on("cpu_libraries"):
        return cpu_libraries.compile_lowered(lowered, closed)
    return lowered.compile()


def may_donate() -> bool:
    """Whether programs may update variables in place, by donation."""
    return is_on("donation")


def atomic_call(compiled: Any) -> Callable[..., Any] | None:
    """Returns an entry to a compiled program that runs no Python, so no signal interrupts it."""
    return donation.atomic_call(compiled) if is_on("donation") else None


def inputs(arguments: Sequence[Any], is_numpy: Sequence[bool]) -> Any:
    """Returns the converter of arguments to inputs of a program; see `PlainInputs`."""
    if is_on("input_buffers") and input_buffers.works():
        return input_buffers.InputBuffers(arguments, is_numpy)
    return PlainInputs(arguments)


def row_taker(array: Any) -> Taker:
    """Returns a function that copies the rows of an array at the given places."""
    plain = type(array) is np.ndarray and not array.dtype.hasobject
    if plain and is_on("row_buffers") and row_buffers.works():
        return row_buffers.RowTaker(array)
    return plain_taker(array)


def pack(variables: Iterable[Variable], kinds: Mapping[int, str]) -> None:
    """Packs small variables into shared arrays; `kinds` has those that may be packed, by id."""
    if is_on("packed_variables", private.lib):
        packed_variables.pack(variables, kinds)


def unpack(variables: Iterable[Variable]) -> None:
    """Gives packed variables their own arrays again."""
    packed_variables.unpack(variables)


def pack_of(variable: Variable) -> Pack | None:
    """Returns the pack that stores a variable, if any."""
    return packed_variables.pack_of(variable)


def assign(variables: Sequence[Variable], values: Sequence[Any]) -> None:
    """Assigns values to variables, with one write per pack."""
    if is_on("packed_variables", private.lib):
        packed_variables.assign(variables, values)
    else:
        assign_each(variables, values)
