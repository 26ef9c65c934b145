"""JAX: a recorded step as a function of the arrays that hold its variables.

step(variables, arguments) --StateLayout--> program(changed, fixed, arguments)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex

from trainstep._engines.contract import Tensor, Variable
from trainstep._engines.jax.tricks import Pack, pack_of


class StateLayout:
    """What holds the variables of a step: themselves, or packs of several.

    Args:
        closed: The jaxpr of the step, of its variables and arguments.
        reads: The variables that it reads, in the order of its inputs.
        writes: Those that it writes, in the order of its outputs.
        repeat: How many steps there are in one call, if not 0.

    Attributes:
        changed: What holds those that are read and written.
        fixed: What holds those that are only read.
        writes: What holds those that are written: `changed`, and what is not read.
        arguments: The other inputs of the program.
        results: Its other outputs.
    """

    def __init__(
        self, closed: Any, reads: list[Variable], writes: list[Variable], repeat: int
    ) -> None:
        self._closed, self._repeat = closed, repeat
        self._reads, self._writes = reads, writes
        read, written = _holders(reads), _holders(writes)
        # Of a pack that is written, the other parts are read; and what the second of several steps
        # finds, the first has to begin with.
        read |= {key: h for key, h in written.items() if repeat or isinstance(h, Pack)}
        changed = [h for key, h in read.items() if key in written]
        # Packs last: with one of them first, XLA orders the kernels of a deep network otherwise,
        # and they take a seventh longer.
        self.changed = sorted(changed, key=lambda h: isinstance(h, Pack))
        self.fixed = [h for key, h in read.items() if key not in written]
        # JAX pairs donated inputs with outputs of their shape in the order it finds them. In one
        # order, every variable gets its own buffer back; in another, XLA has to copy most of them.
        self.writes = [*self.changed, *(h for key, h in written.items() if key not in read)]
        self.arguments = [self._shaped(aval) for aval in closed.in_avals[len(reads) :]]
        self.results = [self._shaped(aval) for aval in closed.out_avals[len(writes) :]]

    @property
    def state(self) -> list[Any]:
        """What holds the variables that are read, in the order of the program's inputs."""
        return [*self.changed, *self.fixed]

    def shapes(self) -> list[Any]:
        """The inputs of the program before its arguments."""
        return [jax.ShapeDtypeStruct(h._value.shape, h._value.dtype) for h in self.state]

    def program(self) -> Callable[..., list[Tensor]]:
        """The step, or several of them, as a function of the state and the arguments."""
        one = self._one()
        if not self._repeat:
            return one
        changed, state, written = len(self.changed), len(self.state), len(self.writes)

        def several(*operands: Tensor) -> list[Tensor]:
            def step(old: list[Tensor], batch: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
                results = one(*old, *operands[changed:state], *batch)
                return results[:written], results[written:]

            begin, batches = list(operands[:changed]), list(operands[state:])
            end, outputs = lax.scan(step, begin, batches, length=self._repeat)
            return [*end, *outputs]

        return several

    def _one(self) -> Callable[..., list[Tensor]]:
        step, state = jex.jaxpr_as_fun(self._closed), self.state

        def held(*operands: Tensor) -> list[Tensor]:
            given = dict(zip(map(id, state), operands, strict=False))
            values = [_value_in(given, variable) for variable in self._reads]
            results = step(*values, *operands[len(state) :])
            new = dict(zip(map(id, self._writes), results, strict=False))
            kept = [
                h.joined(given[id(h)], new) if isinstance(h, Pack) else new[id(h)]
                for h in self.writes
            ]
            return [*kept, *results[len(self._writes) :]]

        return held

    def _shaped(self, aval: Any) -> Any:
        lead = (self._repeat,) * bool(self._repeat)
        return jax.ShapeDtypeStruct((*lead, *aval.shape), aval.dtype)

    def fits(self) -> bool:
        """Whether the variables are still held so."""
        return all(pack.is_whole for pack in self._packs())

    def locks(self) -> list[Any]:
        """What is held while a program takes and replaces arrays that others may look at."""
        return list({id(pack.lock): pack.lock for pack in self._packs()}.values())

    def settled(self, old: Sequence[Tensor], results: Sequence[Tensor]) -> list[Tensor]:
        """What a program gives its variables whose old state others could see and change."""
        written = {id(variable) for variable in self._writes}
        given = dict(zip(map(id, self.state), old, strict=True))
        return [
            h.merged(given[id(h)], value, written) if isinstance(h, Pack) else value
            for h, value in zip(self.writes, results, strict=False)
        ]

    def _packs(self) -> Sequence[Pack]:
        return [h for h in self.state if isinstance(h, Pack)]


def _holders(variables: Iterable[Variable]) -> dict[int, Any]:
    holders = (pack_of(variable) or variable for variable in variables)
    return {id(holder): holder for holder in holders}


def _value_in(given: dict[int, Tensor], variable: Variable) -> Tensor:
    pack = pack_of(variable)
    if pack is None:
        return given[id(variable)]
    return pack.parts[id(variable)].cut(given[id(pack)])
