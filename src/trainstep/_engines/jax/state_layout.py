"""JAX: a recorded step as a function of the arrays that store its variables.

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
    """The holders of the variables of a step: a variable itself, or the pack that stores it.

    Args:
        closed: The jaxpr of the step, whose inputs are its variables and arguments.
        reads: The variables that it reads, in the order of its inputs.
        writes: The variables that it writes, in the order of its outputs.
        repeat: The number of steps in one call; 0: a single-step program.

    Attributes:
        changed: The holders that are read and written.
        fixed: The holders that are only read.
        writes: The holders that are written: `changed`, and those that are not read.
        arguments: The other inputs of the program.
        results: Its other outputs.
    """

    def __init__(
        self, closed: Any, reads: list[Variable], writes: list[Variable], repeat: int
    ) -> None:
        self._closed, self._repeat = closed, repeat
        self._reads, self._writes = reads, writes
        read, written = _holders(reads), _holders(writes)
        # Writing a pack also reads its other parts. With several steps, the loop carries every
        # written value, so the first step needs an initial one.
        read |= {key: h for key, h in written.items() if repeat or isinstance(h, Pack)}
        changed = [h for key, h in read.items() if key in written]
        # Packs last: if one comes first, XLA orders the kernels of a deep network differently, and
        # they take a seventh longer.
        self.changed = sorted(changed, key=lambda h: isinstance(h, Pack))
        self.fixed = [h for key, h in read.items() if key not in written]
        # JAX pairs donated inputs with outputs of the same shape, in order. In the same order,
        # every variable gets its own buffer back; in another one, XLA copies most of them.
        self.writes = [*self.changed, *(h for key, h in written.items() if key not in read)]
        self.arguments = [self._shaped(aval) for aval in closed.in_avals[len(reads) :]]
        self.results = [self._shaped(aval) for aval in closed.out_avals[len(writes) :]]

    @property
    def state(self) -> list[Any]:
        """The holders that are read, in the order of the program's inputs."""
        return [*self.changed, *self.fixed]

    def shapes(self) -> list[Any]:
        """Returns the shapes and dtypes of the state inputs."""
        return [jax.ShapeDtypeStruct(h._value.shape, h._value.dtype) for h in self.state]

    def program(self) -> Callable[..., list[Tensor]]:
        """Returns the step, or several steps, as a function of the state and the arguments."""
        one = self._single_step()
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

    def _single_step(self) -> Callable[..., list[Tensor]]:
        step, state = jex.jaxpr_as_fun(self._closed), self.state

        def step_of_holders(*operands: Tensor) -> list[Tensor]:
            given = dict(zip(map(id, state), operands, strict=False))
            values = [_value_in(given, variable) for variable in self._reads]
            results = step(*values, *operands[len(state) :])
            new = dict(zip(map(id, self._writes), results, strict=False))
            kept = [
                h.updated(given[id(h)], new) if isinstance(h, Pack) else new[id(h)]
                for h in self.writes
            ]
            return [*kept, *results[len(self._writes) :]]

        return step_of_holders

    def _shaped(self, aval: Any) -> Any:
        lead = (self._repeat,) * bool(self._repeat)
        return jax.ShapeDtypeStruct((*lead, *aval.shape), aval.dtype)

    def fits(self) -> bool:
        """Whether the variables still have these holders."""
        return all(pack.is_active for pack in self._packs())

    def locks(self) -> list[Any]:
        """Returns the locks to hold while a program takes and replaces packed arrays."""
        return list({id(pack.lock): pack.lock for pack in self._packs()}.values())

    def merged(self, old: Sequence[Tensor], results: Sequence[Tensor]) -> list[Tensor]:
        """Returns the new state, merged with assignments that were made during the step."""
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
    return pack.parts[id(variable)].extract(given[id(pack)])
