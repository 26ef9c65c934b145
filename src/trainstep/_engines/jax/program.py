"""JAX: a recorded step, compiled ahead of time, and Python's part in running it.

jaxpr(state, arguments) --rewrite, jit, lower, compile--> executable, written state donated
"""

from __future__ import annotations

import contextlib
import operator
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, islice, repeat, starmap
from operator import itemgetter, setitem
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from trainstep._common.codegen import Source, define
from trainstep._common.errors import calls_the_host
from trainstep._engines.contract import Options, Tensor, Variable
from trainstep._engines.jax.deferred_signals import Late, keeping_signals
from trainstep._engines.jax.disk_cache import on_disk
from trainstep._engines.jax.host import hosts_in
from trainstep._engines.jax.layout import Spread, active, copied, lies
from trainstep._engines.jax.processes import with_others
from trainstep._engines.jax.state_layout import Held
from trainstep._engines.jax.tricks.cpu_libraries import compiled
from trainstep._engines.jax.tricks.direct_call import Straight, entry, straight
from trainstep._engines.jax.tricks.input_buffers import Feeds
from trainstep._engines.jax.tricks.packed_variables import pack, unpack
from trainstep._engines.jax.tricks.rewrites import rewritten
from trainstep._engines.jax.tricks.single_kernel import as_one_kernel, compiled_small, is_small
from trainstep._engines.shared.host_function import Host, surfacing

_value = itemgetter("_value")
_consume: Callable[[Iterable[Any]], None] = deque(maxlen=0).extend


def build(
    closed: Any,
    reads: list[Variable],
    writes: list[Variable],
    options: Options,
    *,
    unseen: Mapping[int, str],
    of_numpy: Sequence[bool] = (),
) -> Lean | Careful:
    """Compiles a recorded step.

    Inputs are ordered as: state that is read and written, state that is only read, arguments.

    Args:
        closed: Its jaxpr, of the variables and the arguments.
        reads: The variables that it reads, in the order of its inputs.
        writes: Those that it writes, in the order of its outputs.
        options: What the user asked for.
        unseen: Of what kind those are that hardly anybody but a step looks at, by id.
        of_numpy: Which of the arguments come from NumPy, as far as known.
    """
    layout = options.layout or active(reads)
    on_cpu = jax.default_backend() == "cpu"
    written = {id(v) for v in writes}
    if layout is not None:
        unpack([*reads, *writes])
    elif on_cpu:
        closed = rewritten(closed)
        # What an optimizer only reads are rates and limits, which people set between the steps: in
        # a pack, that would wait for the step before.
        kinds = {k: kind for k, kind in unseen.items() if k in written or kind != "slot"}
        pack([*reads, *writes], kinds)
    held = Held(closed, reads, writes, options.repeat)
    fun, arguments = held.program(), held.arguments
    # A callback may raise after it was dispatched. Such a step keeps the old state until its end.
    fallible = _has_callback(closed.jaxpr)
    # A key is made of its numbers in Python, where Ctrl-C may fall before the new state is stored.
    keyed = any(jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) for x in closed.out_avals)
    donates = options.donate and not fallible and not keyed
    donated = range(len(held.changed)) if donates else ()
    spread = None
    feeds = Feeds(arguments, of_numpy if layout is None and not fallible else ())
    if layout is not None:
        if fallible and layout.mesh.size > 1:
            raise calls_the_host()
        axis = 1 if options.repeat else 0
        spread = Spread(layout, held.state, held.writes, arguments, held.results, axis=axis)
        fun, arguments = spread.around(fun), spread.arguments
    else:
        fun, arguments = feeds.around(fun, len(held.state)), feeds.inputs
    jit = partial(jax.jit, donate_argnums=tuple(donated), **(spread.shardings if spread else {}))
    operands, executable = [*held.shapes(), *arguments], None
    if spread is None and not fallible and on_cpu and is_small(closed):
        lowered = jit(as_one_kernel(fun)).lower(*operands)
        with on_disk():
            executable = compiled_small(lowered, at_once=is_small(closed, options.repeat))
    if executable is None:
        lowered = jit(fun).lower(*operands)
        with on_disk():
            executable = compiled(lowered, closed)
    if fallible:
        return Careful(executable, held, hosts_in(closed.jaxpr), spread.feeds if spread else None)
    late = keeping_signals(executable)
    short = straight(executable, held.shapes(), arguments) if spread is None else None
    return Lean(entry(executable), held, spread or feeds, late, short, donates=bool(donated))


def _has_callback(jaxpr: Any) -> bool:
    return any(
        "callback" in e.primitive.name or any(map(_has_callback, jex.jaxprs_in_params(e.params)))
        for e in jaxpr.eqns
    )


# Python's part of a step. One call in C runs the program and stores the new state: Ctrl-C, which
# Python handles between its own instructions, falls before or after the whole of it, or is kept
# until then (`_jax_signals`). What the iterator then still holds are the outputs.
# The values are unpacked, each to a name: a list that grows to hold hundreds is moved many times
# in the process's heap, which XLA's threads use, too, and that takes longer than all the rest.
_RUN = """
{values} = map(value, slots)
operands = ({operands})
{guard}
{call}
if late:
    late.pop()()
{wait}
"""
_CALL = """
results = from_iterable(starmap(call, (operands,)))
del operands
consume(map(setitem, new, repeat("_value"), results))
outs = list(results)
"""
_STRAIGHT = """
results = None
if all(map(is_same, islice(operands, {state}), map(live, seen))) or takes(operands[:{state}]):
    results = from_iterable(map(arrays_of, starmap(execute, ((operands,),))))
    try:
        consume(map(setitem, new, repeat("_value"), results))
        outs = list(results)
    except refused as error:
        if error.__traceback__.tb_next is not None:  # not the program's, but of a signal's handler
            raise
        results = None  # nothing was given away
if results is None:
    results = from_iterable(starmap(call, (operands,)))
    consume(map(setitem, new, repeat("_value"), results))
    outs = list(results)
seen[:{changed}] = map(ref, islice(map(value, new), {changed}))
del operands
"""
_WAIT = "ready(outs or [slot['_value'] for slot in new])"
# A buffer with another owner (a snapshot, a second variable, a NumPy view) is not ours to give
# away: it is copied, and the owner keeps the old one. No count is less than that of a buffer which
# is alone, so their sum tells; it is found faster than the largest.
_GUARD = """
if sum(map(refcount, islice(operands, {count}))) > alone:
    counts = list(map(refcount, islice(operands, {count})))
    operands = (*apart(operands[:{count}], counts), *operands[{count}:])
"""


class Lean:
    """Runs a compiled step on the variables where they are."""

    def __init__(
        self,
        call: Callable[..., Any],
        held: Held,
        feeds: Feeds | Spread,
        late: Late,
        short: Straight | None,
        *,
        donates: bool,
    ) -> None:
        self._held, self._feeds, self._straight = held, feeds, short
        changed, fixed, writes = held.changed, held.fixed, held.writes
        self._guard = _GUARD.format(count=len(changed)) if donates else ""
        self._values = [f"v{place}" for place in range(len(changed) + len(fixed))]
        self._locks = {f"lock{place}": lock for place, lock in enumerate(held.locks())}
        self._lie = [v._value.sharding for v in (*changed, *fixed)]
        # The variables' own dicts: a third cheaper than attributes, and there are many of them.
        self._names = {
            "call": call,
            "slots": _slots([*changed, *fixed]),
            "new": _slots(writes),
            "alone": _ALONE * len(changed),
            "inputs": feeds,
            "late": late,
            **self._locks,
            **_TOOLS,
        }
        self._wait = ""
        if isinstance(feeds, Spread):
            self._names["apart"] = _apart_in_parts
            self._wait = _WAIT if feeds.waits else ""
            if feeds.is_shared:
                self._names["call"] = with_others(call)
                self._names["ready"] = with_others(jax.block_until_ready)
        text = self._text(["*inputs(leaves)"]) + "return outs"
        self._run = define("run(leaves)", text, self._names)

    def _text(self, inputs: Sequence[str], call: str = _CALL) -> str:
        text = _RUN.format(
            values=f"[{', '.join(self._values)}]",
            operands="".join(f"{each}, " for each in (*self._values, *inputs)),
            guard=self._guard,
            call=call,
            wait=self._wait,
        )
        if not self._locks:
            return text
        return f"with {', '.join(self._locks)}:\n{textwrap.indent(text, '    ')}"

    def __call__(self, leaves: Sequence[Any]) -> Sequence[Tensor]:
        return self._run(leaves)  # type: ignore[no-any-return]

    def fits(self) -> bool:
        """Whether the variables are where they were when the program was compiled."""
        return self._held.fits() and all(map(lies, map(_value, self._names["slots"]), self._lie))

    @property
    def is_spread(self) -> bool:
        """Whether the program runs on several devices."""
        return isinstance(self._feeds, Spread)

    def inline(self, arrays: dict[str, Any]) -> Source:
        """The same for these arguments, to be written into the path of a hit."""
        fed, inputs = self._feeds.source(arrays)
        names, call = {**self._names, **fed.names}, _CALL
        # Arrays of the user's may lie anywhere, and in any way.
        if self._straight is not None and all(type(x) is np.ndarray for x in arrays.values()):
            names |= self._straight.names
            counts = {"state": len(self._values), "changed": len(self._held.changed)}
            inputs, call = self._straight.put(inputs), _STRAIGHT.format(**counts)
        return Source(fed.text + self._text(inputs, call), names)

    def running(self, arguments: Sequence[str]) -> Source:
        """The same for arguments that nobody else writes to, given as expressions."""
        inputs, names = self._feeds.taken(arguments)
        return Source(self._text(inputs), {**self._names, **names})


class Careful:
    """Runs a compiled step that calls the host, and may fail late, on the variables' values."""

    def __init__(
        self,
        call: Callable[..., Any],
        held: Held,
        hosts: Sequence[Host],
        feeds: Sequence[Callable[[Any], Tensor]] | None,
    ) -> None:
        self._call, self._held, self._feeds = call, held, feeds
        self._old, self._new = _slots(held.state), _slots(held.writes)
        self._surfacing = surfacing(self._run, hosts)
        self.fits = held.fits

    def __call__(self, leaves: Sequence[Any]) -> Sequence[Tensor]:
        return self._surfacing(leaves)  # type: ignore[no-any-return]

    def _run(self, leaves: Sequence[Any]) -> list[Tensor]:
        leaves = leaves if self._feeds is None else list(map(operator.call, self._feeds, leaves))
        old, count = list(map(_value, self._old)), len(self._new)
        results = jax.block_until_ready(self._call(*old, *leaves))
        jax.effects_barrier()  # a step may have no result that would have to be waited for
        with contextlib.ExitStack() as locked:
            for lock in self._held.locks():
                locked.enter_context(lock)
            values = self._held.settled(old, results[:count])
            _consume(map(setitem, self._new, repeat("_value"), values))
        return list(results[count:])


def _slots(variables: list[Variable]) -> list[dict[str, Any]]:
    """Where variables keep their values."""
    if not all("_value" in v.__dict__ for v in variables):
        raise NotImplementedError(
            "trainstep does not run on Keras's Flax NNX variables; unset KERAS_NNX_ENABLED"
        )
    return [v.__dict__ for v in variables]


def _apart(state: Sequence[Tensor], counts: list[int]) -> list[Tensor]:
    """The buffers, with copies of those that have another owner."""
    pairs = zip(state, counts, strict=True)
    return [jnp.array(x, copy=True) if count > _ALONE else x for x, count in pairs]


def _apart_in_parts(state: Sequence[Tensor], counts: list[int]) -> list[Tensor]:
    """The same for arrays over several devices, some of which may be another process's."""
    pairs = zip(state, counts, strict=True)
    return [copied(x) if count > _ALONE else x for x, count in pairs]


def _count_when_alone() -> int:
    """The reference count of a buffer that only its variable holds, as `_GUARD` sees it."""
    slots = [{"_value": object()}]
    [v0] = map(_value, slots)
    operands = (v0,)
    return max(map(sys.getrefcount, islice(operands, 1)))


_ALONE = _count_when_alone()
_TOOLS = {
    "apart": _apart,
    "consume": _consume,
    "from_iterable": chain.from_iterable,
    "islice": islice,
    "ready": jax.block_until_ready,
    "refcount": sys.getrefcount,
    "repeat": repeat,
    "setitem": setitem,
    "starmap": starmap,
    "value": _value,
}
