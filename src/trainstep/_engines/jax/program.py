"""JAX: compiles a recorded step ahead of time, and runs it on the variables.

jaxpr(state, arguments) --rewrite, jit, lower, compile--> executable, written state donated
"""

from __future__ import annotations

import contextlib
import functools
import operator
import textwrap
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice, repeat, starmap
from operator import itemgetter, setitem
from typing import Any

import jax
from jax.extend import core as jex

from trainstep._common.codegen import Source, define
from trainstep._common.errors import calls_the_host
from trainstep._engines.contract import Options, Tensor, Variable
from trainstep._engines.jax import tricks
from trainstep._engines.jax.disk_cache import on_disk
from trainstep._engines.jax.host import hosts_in
from trainstep._engines.jax.layout import Spread, active, copy_shards, has_sharding
from trainstep._engines.jax.processes import with_others
from trainstep._engines.jax.refcounts import expected_count, refcount
from trainstep._engines.jax.state_layout import StateLayout
from trainstep._engines.shared.host_function import Host, raising_host_errors

_value = itemgetter("_value")
_consume: Callable[[Iterable[Any]], None] = deque(maxlen=0).extend


def build(
    closed: Any,
    reads: list[Variable],
    writes: list[Variable],
    options: Options,
    *,
    packable: Mapping[int, str],
    is_numpy: Sequence[bool] = (),
) -> FastExecutable | WaitingExecutable:
    """Compiles a recorded step.

    The order of inputs is: state that is read and written, state that is only read, arguments.

    Args:
        closed: The jaxpr, whose inputs are the variables and the arguments.
        reads: The variables that it reads, in the order of its inputs.
        writes: The variables that it writes, in the order of its outputs.
        options: The options of the user.
        packable: By id, the kind of each variable that code outside of steps rarely reads.
        is_numpy: Which arguments are NumPy arrays; () if unknown.
    """
    layout = options.layout or active(reads)
    on_cpu = jax.default_backend() == "cpu"
    if layout is not None:
        tricks.unpack([*reads, *writes])
    elif on_cpu:
        closed = tricks.rewritten(closed)
        # Optimizer variables that a step only reads are learning rates and limits. Users assign
        # them between steps, and assigning a packed variable waits for the last step.
        written = {id(v) for v in writes}
        kinds = {k: kind for k, kind in packable.items() if k in written or kind != "slot"}
        tricks.pack([*reads, *writes], kinds)
    state_layout = StateLayout(closed, reads, writes, options.repeat)
    fun, arguments = state_layout.program(), state_layout.arguments
    # A callback may raise after dispatch, so such a step keeps the old state until it has ended.
    fallible = _has_callback(closed.jaxpr)
    # JAX assembles PRNG keys in Python, where Ctrl-C can interrupt before the state is stored.
    keyed = any(jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) for x in closed.out_avals)
    may_donate = tricks.may_donate() and options.donate and _unshared_count() is not None
    donates = may_donate and not fallible and not keyed
    spread = None
    inputs = tricks.inputs(arguments, is_numpy if layout is None and not fallible else ())
    if layout is not None:
        if fallible and layout.mesh.size > 1:
            raise calls_the_host()
        axis = 1 if options.repeat else 0
        spread = Spread(
            layout,
            state_layout.state,
            state_layout.writes,
            arguments,
            state_layout.results,
            axis=axis,
        )
        fun, arguments = spread.wrap(fun), spread.arguments
    else:
        fun, arguments = inputs.wrap(fun, len(state_layout.state)), inputs.inputs
    donated = tuple(range(len(state_layout.changed))) if donates else ()
    jitted = jax.jit(fun, donate_argnums=donated, **(spread.shardings if spread else {}))
    lowered = jitted.lower(*state_layout.shapes(), *arguments)
    with on_disk():
        executable = tricks.compile_lowered(lowered, closed)
    if fallible:
        return WaitingExecutable(
            executable, state_layout, hosts_in(closed.jaxpr), spread.placers if spread else None
        )
    return FastExecutable(executable, state_layout, spread or inputs, donates=bool(donated))


def _has_callback(jaxpr: Any) -> bool:
    return any(
        "callback" in e.primitive.name or any(map(_has_callback, jex.jaxprs_in_params(e.params)))
        for e in jaxpr.eqns
    )


# The Python code of a step. One call in C runs the program and stores the new state. Python handles
# Ctrl-C between bytecode instructions, so it interrupts before or after the whole call. After the
# new state is stored, the iterator still holds the outputs. Each value is unpacked to a name of its
# own: a list of hundreds of values is reallocated many times as it grows, in a heap that XLA's
# threads use as well, which takes longer than all the rest.
_RUN = """
{values} = map(value, slots)
operands = ({operands})
if unsafe:
    outs = run_interruptible(unsafe, operands)
else:
{guard}
    results = from_iterable(starmap(call, (operands,)))
    del operands
    consume(map(setitem, new, repeat("_value"), results))
    outs = list(results)
{wait}
"""
_WAIT = "ready(outs or [slot['_value'] for slot in new])"
# A buffer with another owner (a snapshot, a second variable, a NumPy view) must not be donated: the
# program gets a copy, and the owner keeps the buffer. No reference count is below that of a buffer
# without other owners, so checking the sum suffices, and `sum` is faster than `max`.
_GUARD = """
    if sum(map(refcount, islice(operands, {count}))) > alone:
        counts = list(map(refcount, islice(operands, {count})))
        operands = (*unalias(operands[:{count}], counts), *operands[{count}:])
"""


def _run_text(values: Sequence[str], inputs: Sequence[str], guard: str, wait: str) -> str:
    operands = "".join(f"{each}, " for each in (*values, *inputs))
    return _RUN.format(values=f"[{', '.join(values)}]", operands=operands, guard=guard, wait=wait)


@functools.cache
def _unshared_count() -> int | None:
    """Returns the reference count of a buffer without another owner in `_GUARD`."""
    found: list[bool] = []

    def unalias(state: Sequence[Any], counts: Sequence[int]) -> Sequence[Any]:
        found.append(True)
        return state

    slots: list[dict[str, Any]] = [{}]
    names = {**_TOOLS, "new": slots, "slots": slots, "unalias": unalias, "unsafe": ()}
    names["call"] = lambda *operands: operands
    text = _run_text(["v0"], ["*leaves"], _GUARD.format(count=1), "")
    run = define("run(leaves)", text, names)

    def trial(alone: Any, is_shared: bool) -> bool:
        found.clear()
        slots[0]["_value"] = object()
        other_owner = [slots[0]["_value"]] if is_shared else None
        run.__globals__["alone"] = alone
        run(())
        del other_owner
        return bool(found)

    # By the variable's `__dict__`, `v0`, `operands` and the argument of `refcount`.
    return expected_count("a variable that a step writes", trial, most=4)


# JAX runs the first call of each kind (of a program; with NumPy arrays; with its own arrays) in
# Python code, where Ctrl-C could interrupt between donation and the store of the new state.
_UNSAFE_CALLS = 2


class FastExecutable:
    """Runs a compiled step on the variables, with in-place updates.

    Args:
        compiled: The step.
        state_layout: The layout of its state.
        inputs: Turns arguments into inputs: `PlainInputs`, `InputBuffers` or `Spread`.
        donates: Whether the program takes the old state by donation.
    """

    def __init__(
        self, compiled: Callable[..., Any], state_layout: StateLayout, inputs: Any, *, donates: bool
    ) -> None:
        self._state_layout, self._inputs, self._donates = state_layout, inputs, donates
        changed, fixed, writes = state_layout.changed, state_layout.fixed, state_layout.writes
        atomic = tricks.atomic_call(compiled)
        self._call, self._is_atomic = atomic or compiled, atomic is not None
        self._guard = _GUARD.format(count=len(changed)) if donates else ""
        self._values = [f"v{place}" for place in range(len(changed) + len(fixed))]
        self._locks = {f"lock{place}": lock for place, lock in enumerate(state_layout.locks())}
        self._shardings = [v._value.sharding for v in (*changed, *fixed)]
        # The variables' `__dict__`: a third faster than attribute access, for many variables.
        self._slots, self._new = _slots([*changed, *fixed]), _slots(writes)
        self._copy, self._ready = _copy, jax.block_until_ready
        self._wait = ""
        if isinstance(inputs, Spread):
            self._copy = copy_shards
            self._wait = _WAIT if inputs.must_wait else ""
            if inputs.is_multiprocess:
                self._call, self._ready = with_others(self._call), with_others(self._ready)
        self._names = {
            "alone": (_unshared_count() or 0) * len(changed),
            "call": self._call,
            "inputs": inputs,
            "new": self._new,
            "ready": self._ready,
            "run_interruptible": self._run_interruptible,
            "slots": self._slots,
            "unalias": self._unalias,
            **self._locks,
            **_TOOLS,
        }
        self._kinds: set[Any] = set()
        self._unsafe: list[None] = []
        text = self._text(["*inputs(leaves)"]) + "return outs"
        self._run = define("run(leaves)", text, {**self._names, "unsafe": self._unsafe})

    def _text(self, inputs: Sequence[str]) -> str:
        text = _run_text(self._values, inputs, self._guard, self._wait)
        if not self._locks:
            return text
        return f"with {', '.join(self._locks)}:\n{textwrap.indent(text, '    ')}"

    def __call__(self, leaves: Sequence[Any]) -> Sequence[Tensor]:
        kind = tuple((type(x), getattr(x, "committed", None)) for x in leaves)
        if kind not in self._kinds:
            self._kinds.add(kind)
            self._unsafe.extend([None] * _UNSAFE_CALLS)
        return self._run(leaves)  # type: ignore[no-any-return]

    def _run_interruptible(self, unsafe: list[None], operands: Sequence[Any]) -> list[Tensor]:
        """Runs the program in Python code, which a signal handler may interrupt at any point.

        It donates copies, so an exception leaves the variables unchanged.
        """
        if self._is_atomic:
            unsafe.pop()
        changed, state = len(self._state_layout.changed), len(self._slots)
        while True:
            donated = (
                [*map(self._copy, operands[:changed])] if self._donates else operands[:changed]
            )
            results = self._call(*donated, *operands[changed:])
            values = [*map(_value, self._slots)]
            if all(map(operator.is_, values, operands)):
                break
            operands = (*values, *operands[state:])  # a signal handler has run a step: start again
        outputs = iter(results)
        _consume(map(setitem, self._new, repeat("_value"), outputs))
        return list(outputs)

    def _unalias(self, state: Sequence[Tensor], counts: list[int]) -> list[Tensor]:
        """Returns the buffers, with copies of those that have another owner."""
        pairs, alone = zip(state, counts, strict=True), _unshared_count() or 0
        return [self._copy(x) if count > alone else x for x, count in pairs]

    def fits(self) -> bool:
        """Whether the variables are stored as they were when the program was compiled."""
        return self._state_layout.fits() and all(
            map(has_sharding, map(_value, self._slots), self._shardings)
        )

    @property
    def is_spread(self) -> bool:
        """Whether the program runs on several devices."""
        return isinstance(self._inputs, Spread)

    def inline(self, arrays: dict[str, Any]) -> Source:
        """Returns the same for arguments like these, as statements of the fast path."""
        prepared, inputs = self._inputs.source(arrays)
        return self._inlined(prepared.text, inputs, prepared.names)

    def running(self, arguments: Sequence[str]) -> Source:
        """Returns the same for expressions of arguments that are never modified."""
        inputs, names = self._inputs.expressions(arguments)
        return self._inlined("", inputs, names)

    def _inlined(self, before: str, inputs: Sequence[str], names: Mapping[str, Any]) -> Source:
        unsafe = [None] * _UNSAFE_CALLS  # not shared: this text serves one kind of arguments
        return Source(before + self._text(inputs), {**self._names, **names, "unsafe": unsafe})


class WaitingExecutable:
    """Runs a compiled step with host calls, and writes the new state after its last call."""

    def __init__(
        self,
        call: Callable[..., Any],
        state_layout: StateLayout,
        hosts: Sequence[Host],
        placers: Sequence[Callable[[Any], Tensor]] | None,
    ) -> None:
        self._call, self._state_layout, self._placers = call, state_layout, placers
        self._old, self._new = _slots(state_layout.state), _slots(state_layout.writes)
        self._raising = raising_host_errors(self._run, hosts)
        self.fits = state_layout.fits

    def __call__(self, leaves: Sequence[Any]) -> Sequence[Tensor]:
        return self._raising(leaves)  # type: ignore[no-any-return]

    def _run(self, leaves: Sequence[Any]) -> list[Tensor]:
        leaves = (
            leaves if self._placers is None else list(map(operator.call, self._placers, leaves))
        )
        old, count = list(map(_value, self._old)), len(self._new)
        results = jax.block_until_ready(self._call(*old, *leaves))
        jax.effects_barrier()  # also waits for a step without results
        with contextlib.ExitStack() as locked:
            for lock in self._state_layout.locks():
                locked.enter_context(lock)
            values = self._state_layout.merged(old, results[:count])
            _consume(map(setitem, self._new, repeat("_value"), values))
        return list(results[count:])


def _slots(variables: list[Variable]) -> list[dict[str, Any]]:
    """Returns the `__dict__` of each variable, where its value is stored."""
    if not all("_value" in v.__dict__ for v in variables):
        raise NotImplementedError(
            "trainstep does not run on Keras's Flax NNX variables; unset KERAS_NNX_ENABLED"
        )
    return [v.__dict__ for v in variables]


def _copy(x: Tensor) -> Tensor:
    # Not `jnp.array`, which compiles a program for each shape.
    return jax.device_put(x, may_alias=False)


_TOOLS = {
    "consume": _consume,
    "from_iterable": chain.from_iterable,
    "islice": islice,
    "refcount": refcount,
    "repeat": repeat,
    "setitem": setitem,
    "starmap": starmap,
    "value": _value,
}
