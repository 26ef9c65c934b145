"""A cache miss: checks the call, traces the step, compiles it, and records it in the ledger.

    values --does not fit the signature--> ArgumentError
           --dynamic sizes--> one record for all sizes, an existing or a new one
           --max_traces reached--> RetraceLimitError, with the ledger entry
           --trace--> the step as the engine recorded it --compile--> Program --> ledger, cache

`sizes/families.py` compiles the programs of a record with dynamic sizes.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from trainstep._common import user_code
from trainstep._common.errors import RetraceLimitError
from trainstep._engines import Executable, Refused, Sizes, Traced
from trainstep._explain.ledger import TraceEvent
from trainstep._function.arguments import Arguments, Key
from trainstep._function.declared_signature import Declared
from trainstep._function.dtypes import Dtypes
from trainstep._function.measure_compilers import MeasuringExecutable
from trainstep._function.parameters import Parameters
from trainstep._function.program_cache import Program
from trainstep._function.settings import StepSettings
from trainstep._function.shared_programs import shared
from trainstep._function.sizes.families import Call, DynamicSizes
from trainstep._function.sizes.family import Family
from trainstep._function.sizes.pattern import Pattern
from trainstep._function.sizes.policy import DynamicAxes
from trainstep._function.trace_reason import TraceReason
from trainstep._function.tracer import Record, Tracer
from trainstep._state.locks import domain_of

# One trace at a time: tracing builds layers and runs the user's Python, which need not be
# thread-safe. A cache hit does not acquire this lock.
_tracing = threading.RLock()


class Flat(NamedTuple):
    """A flattened call: the values converted to the signature, the key and the arrays."""

    values: Sequence[Any]
    key: Key
    leaves: list[Any]


class Compiler:
    """Compiles the programs of one function."""

    def __init__(self, fn: Callable[..., Any], settings: StepSettings) -> None:
        self._settings, self._engine, self.name = settings, settings.engine, settings.name
        self.parameters = Parameters(fn)
        self.arguments = Arguments(self._engine)
        names, signature = self.parameters.names, settings.signature
        self._declared = (
            None
            if signature is None
            else Declared(self.name, names, signature, self._engine.canonical)
        )
        declared = {} if self._declared is None else self._declared.dtypes()
        self._dtypes = Dtypes(self.name, self.arguments, names, declared)
        axes = DynamicAxes(settings.dynamic, names)
        if self._declared is not None:
            self._declared.declare_sizes(axes)
        self.cells: Any = _closure(fn)
        kept = shared(fn, settings, self._declared)
        self.programs, self.ledger, self.guard = kept
        self._tracer = Tracer(fn, self.guard.wrap(fn), self.parameters, self.arguments, settings)
        self._written: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._sizes = DynamicSizes(settings, axes, self.programs, self.ledger, self.cells)
        self._reason = TraceReason(self.name, self.programs, self.ledger, self._sizes, self.cells)

    def written(self) -> list[Any]:
        """Returns the variables that the programs write, in the order of their first trace."""
        return list(self._written.values())

    def flatten(self, values: Sequence[Any]) -> Flat:
        """Converts the values of a call to the signature, and returns their key and arrays too."""
        if self._declared is not None:
            values = self._declared.conform(values)
        try:
            key, leaves = self._dtypes.conform(*self.arguments.flatten(values), values)
        except (TypeError, ValueError):
            for _ in self.arguments.parts(self.name, self.parameters.names, values):
                pass  # raises an ArgumentError that names the culprit
            raise
        return Flat(values, key, leaves)

    def program(self, flat: Flat) -> Program:
        """Returns the program for a call that the cache has none for."""
        site = user_code.caller()
        program = self._sizes.find(flat.key)  # another size of a known record: no trace, so no lock
        if program is not None:
            return program
        with _tracing:
            # Another thread may have compiled it while this one waited for the lock.
            program = self.programs.find(flat.key, self.cells) or self._sizes.find(flat.key)
            if program is not None:
                return program
            call = self._describe(flat, site)
            return self._sizes.find_or_compile(call) or self._trace(call)

    def warm_up(self, values: Sequence[Any], *, smaller: bool) -> None:
        """Compiles the program for a call ahead of time; with `smaller`, also for smaller sizes."""
        site = user_code.caller()
        with _tracing:
            flat = self.flatten(values)
            call = self._describe(flat, site)
            if smaller:
                self._sizes.expect(call)
            known = self.programs.find(flat.key, self.cells) or self._sizes.find(flat.key)
            if known is None or smaller:
                _ = self._sizes.find_or_compile(call) or self._trace(call)
            if smaller:
                self._sizes.warm_up(call)

    def sizes(self, values: Sequence[Any]) -> dict[str, int]:
        """Returns the dynamic sizes of a call, by name."""
        return self._sizes.sizes(self._describe(self.flatten(values), ""))

    def _describe(self, flat: Flat, site: str) -> Call:
        parts = self.arguments.parts(self.name, self.parameters.names, flat.values)
        return Call(*flat, self._dtypes.parts(flat.key, parts), site)

    def _trace(self, call: Call) -> Program:
        """Traces the step: for all sizes if they are dynamic, or for the shapes of the call."""
        if self._declared is not None:
            self._declared.check(call.values, call.parts)
        if self._settings.check is not None:
            self._settings.check(*call.values)
        self._sizes.check(call)
        found = self._sizes.pattern(call)
        if found is not None and self._record_dynamic(call, *found):
            served = self._sizes.find_or_compile(call)
            if served is not None:
                return served
        try:
            program = self._trace_exact(call)
        except BaseException:
            self._sizes.withdraw_refusals(call)  # the sizes were not the cause
            raise
        self._sizes.report_refusals(call.site)
        return program

    def _record_dynamic(self, call: Call, pattern: Pattern, first: Sizes) -> bool:
        """Records the step with dynamic sizes; returns whether that was possible."""
        signature, event = self._reason.event(call, pattern)
        self._check_limit(event)
        started = time.perf_counter()
        try:
            record = self._record(call, pattern, first)
        except Refused as refusal:
            advice = "not possible with dynamic sizes: the next trace is for these shapes only"
            self.ledger.record(replace(event, trace_seconds=_since(started), advice=advice))
            self._sizes.refuse(call, pattern, refusal)
            return False
        event = replace(event, trace_seconds=_since(started), **_touched(record))
        traced, watch = record.traced, record.watch
        family = Family(
            index=self.ledger.record(event, signature.with_found(watch.parts(self.cells))),
            compiler="python" if traced.uncompiled else self._engine.compilers[0],
            pattern=pattern,
            traced=traced,
            build=record.build,
            watch=watch,
            domain=domain_of([*traced.reads, *traced.writes]),
            buckets=self._sizes.buckets(pattern, first),
        )
        self._dtypes.fix(call.key, call.parts)
        self.programs.add_family(call.key, family, self.arguments.objects(call.values))
        self._sizes.remember(call, pattern.shapes)
        return True

    def _trace_exact(self, call: Call) -> Program:
        """Traces and compiles for the shapes of this call only."""
        signature, event = self._reason.event(call, None)
        self._check_limit(event)
        program, event = self._compile(call, event)
        program.index = self.ledger.record(
            event, signature.with_found(program.watch.parts(self.cells))
        )
        self._dtypes.fix(call.key, call.parts)
        evicted = self.programs.add(call.key, program, self.arguments.objects(call.values))
        self._sizes.record_evicted(evicted, call.site)
        self._sizes.remember(call, call.key[1])
        return program

    def _record(self, call: Call, *sizes: Any) -> Record:
        record = self._tracer.trace(call, *sizes)
        self._written.update((id(v), v) for v in record.traced.writes)
        return record

    def _check_limit(self, event: TraceEvent) -> None:
        limit = self._settings.max_traces
        if limit is not None and self.ledger.traces >= limit:
            raise RetraceLimitError(limit, event)

    def _compile(self, call: Call, event: TraceEvent) -> tuple[Program, TraceEvent]:
        started = time.perf_counter()
        record = self._record(call)
        traced = record.traced
        traced_at, hits = time.perf_counter(), self._engine.disk_hits()
        compiler, executable = self._build(traced, event.index)
        domain = domain_of([*traced.reads, *traced.writes])
        program = Program(event.index, executable, record.build, record.watch, domain)
        return program, replace(
            event,
            trace_seconds=traced_at - started,
            compile_seconds=_since(traced_at),
            from_disk=self._engine.disk_hits() > hits,
            compiler=compiler,
            advice=_uncompiled_advice(traced.uncompiled) if traced.uncompiled else event.advice,
            **_touched(record),
        )

    def _build(self, traced: Traced, index: int) -> tuple[str, Executable]:
        """Compiles a recorded step with the chosen compiler, or with two that are then measured."""
        if traced.uncompiled:
            return "python", traced.build("")
        compilers = traced.compilers or self._engine.compilers
        quick, thorough = compilers[0], compilers[-1]
        if self._settings.options.optimize != "measure" or quick == thorough:
            compiler = thorough if self._settings.options.optimize == "full" else quick
            return compiler, traced.build(compiler)

        def decided(compiler: str, executable: Executable) -> None:
            self.programs.replace(index, executable)
            self.ledger.set_compiler(index, compiler)

        candidates = {name: traced.build(name) for name in (quick, thorough)}
        return "measuring", MeasuringExecutable(candidates, decided)


def _uncompiled_advice(culprit: str) -> str:
    return f"runs uncompiled, as Python, at every call: this engine cannot record {culprit}"


def _touched(record: Record) -> dict[str, Any]:
    return {
        "reads": tuple(v.path for v in record.traced.reads),
        "writes": tuple(v.path for v in record.traced.writes),
        "effects": record.effects,
    }


def _closure(fn: Any) -> Any:
    """Returns the closure cells of a function, inside any `functools.partial`."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__closure__", None) or ()


def _since(moment: float) -> float:
    return time.perf_counter() - moment
