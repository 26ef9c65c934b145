"""A missing program: checked, announced, traced, compiled, entered in the ledger.

values --declared?--> ArgumentError
--limit?-----> RetraceLimitError, carrying the entry
--trace--> the step as the engine recorded it --compile--> Program --> ledger, cache
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from trainstep import _site
from trainstep._arguments import Arguments
from trainstep._control import traced_control_flow
from trainstep._declared import Declared
from trainstep._domain import domain_of
from trainstep._engines import Engine, Executable, Options, Traced
from trainstep._errors import ControlFlowError, RetraceLimitError, TrainstepError
from trainstep._ledger import TraceEvent, advice
from trainstep._outputs import Build, take_out
from trainstep._parameters import Parameters
from trainstep._program import Key, Program
from trainstep._sharing import shared
from trainstep._signature import Change, Signature, nearest
from trainstep._state import Recorder, deferred_constants
from trainstep._tuning import Tuned
from trainstep._watch import Watch

# One trace at a time: tracing builds layers and runs the user's Python, which is not ours to
# run twice at once. Hits do not take it.
_tracing = threading.RLock()


class Compiler:
    """Makes the programs of one function."""

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        *,
        engine: Engine,
        options: Options,
        declared: Declared | None,
        check: Callable[..., None] | None,
        max_traces: int | None,
    ) -> None:
        self.name = name
        self.parameters = Parameters(fn)
        self.arguments = Arguments(engine)
        settings = (options, engine.name, max_traces, declared and repr(declared))
        self.programs, self.ledger = shared(fn, name, settings)
        self._fn = fn
        self._engine = engine
        self._options = options
        self._declared = declared
        self._check = check
        self._max_traces = max_traces

    def flatten(self, values: Sequence[Any]) -> tuple[Key, list[Any]]:
        """The key of a call and its arrays."""
        if self._declared is not None:
            values = self._declared.conform(values)
        try:
            return self.arguments.flatten(values)
        except (TypeError, ValueError):
            for _ in self.arguments.parts(self.name, self.parameters.names, values):
                pass  # raises an ArgumentError that names the culprit
            raise

    def program(self, values: Sequence[Any]) -> Program:
        """Makes the program for a call."""
        site = _site.caller()
        with _tracing:
            key, leaves = self.flatten(values)
            program = self.programs.find(key)  # another thread may have been faster
            if program is not None:
                return program
            if self._declared is not None:
                values = self._declared.conform(values)
                self._declared.check(values, self.arguments)
            if self._check is not None:
                self._check(*values)
            signature, event = self._announce(values, site)
            if self._max_traces is not None and len(self.ledger) >= self._max_traces:
                raise RetraceLimitError(self._max_traces, event)
            program, event = self._make(values, leaves, event)
            self.ledger.record(event, signature.with_flags(program.watch.parts()))
            self.programs.add(key, program, self.arguments.objects(values))
            return program

    def _announce(self, values: Sequence[Any], site: str) -> tuple[Signature, TraceEvent]:
        """What this call is, and how it differs from the calls before, ahead of the trace."""
        flags = {p.label: p for watch in self.programs.watches() for p in watch.parts()}
        parts = self.arguments.parts(self.name, self.parameters.names, values)
        signature = Signature([*parts, *flags.values()])
        index, changes = nearest(signature, self.ledger.signatures)
        texts = [change.text for change in changes]
        if index is not None and not texts:
            texts = ["the earlier program was dropped with an object that it was compiled for"]
            changes = [Change("object", texts[0])]
        event = TraceEvent(
            index=len(self.ledger) + 1,
            function=self.name,
            signature=str(signature),
            changes=tuple(texts),
            nearest=None if index is None else index + 1,
            site=site,
            advice=advice(changes),
        )
        return signature, event

    def _make(
        self, values: Sequence[Any], leaves: Sequence[Any], event: TraceEvent
    ) -> tuple[Program, TraceEvent]:
        started = time.perf_counter()
        recorder, traced, build = self._trace(values, leaves)
        if any(v.name == "dynamic_scale" for v in recorder.created):
            # Before it is built, Keras's loss-scaling optimizer scales by a Python number,
            # which is in the trace now, and afterwards by this variable. Once more, then.
            recorder, traced, build = self._trace(values, leaves)
        traced_at = time.perf_counter()
        compiler, executable = self._build(traced, event.index)
        compiled_at = time.perf_counter()
        touched = [*traced.reads, *traced.writes]
        watch = Watch(recorder.layers.values(), traced.reads, traced.writes)
        program = Program(event.index, executable, build, watch, domain_of(touched))
        return program, replace(
            event,
            trace_seconds=traced_at - started,
            compile_seconds=compiled_at - traced_at,
            reads=tuple(v.path for v in traced.reads),
            writes=tuple(v.path for v in traced.writes),
            compiler=compiler,
            advice=_uncompiled_advice(traced.uncompiled) if traced.uncompiled else event.advice,
        )

    def _trace(
        self, values: Sequence[Any], leaves: Sequence[Any]
    ) -> tuple[Recorder, Traced, Build]:
        """Runs the user's Python once."""
        recorder = Recorder(self._engine.place)
        builds: list[Build] = []
        objects = self.arguments.objects(values)

        def step(tensors: Sequence[Any]) -> list[Any]:
            call = self.arguments.rebuild(values, iter(tensors))
            result = self.parameters.call(self._fn, call)
            outputs, build = take_out(result, self._engine.is_tensor, objects)
            builds.append(build)
            return outputs

        try:
            with traced_control_flow(by_value=self._engine.branches_by_value), deferred_constants():
                traced = self._engine.trace(step, leaves, recorder, self._options)
        except TrainstepError:
            raise
        except Exception as error:
            asked = self._asks_for_a_value(error)
            if asked is None:
                raise
            where = _site.raised_at(asked.__traceback__)
            raise ControlFlowError(self.name, *where) from error
        return recorder, traced, builds[-1]

    def _asks_for_a_value(self, error: BaseException) -> BaseException | None:
        """The error behind `error` that asked for a value: Keras wraps some in others."""
        found: BaseException | None = error
        while found is not None and not self._engine.asks_for_a_value(found):
            found = found.__context__
        return found

    def _build(self, traced: Traced, index: int) -> tuple[str, Executable]:
        """Compiles a recorded step with the compiler asked for, or with each, to be measured."""
        if traced.uncompiled:
            return "python", traced.build("")
        quick, thorough = self._engine.compilers[0], self._engine.compilers[-1]
        if self._options.optimize != "measure" or quick == thorough:
            compiler = thorough if self._options.optimize == "full" else quick
            return compiler, traced.build(compiler)

        def decided(compiler: str, executable: Executable) -> None:
            self.programs.replace(index, executable)
            self.ledger.set_compiler(index, compiler)

        candidates = {name: traced.build(name) for name in (quick, thorough)}
        return "measuring", Tuned(candidates, decided)


def _uncompiled_advice(culprit: str) -> str:
    return f"runs as Python at every call, uncompiled: this engine cannot record {culprit}"
