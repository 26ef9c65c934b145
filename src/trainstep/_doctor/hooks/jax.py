"""JAX: listeners on its monitoring events, which cost nothing at calls without a trace.

scalar event    a trace starts; the frames on the stack have the function and its arguments
test event      the user's Python really runs, instead of a hit in JAX's trace cache
duration event  a trace, a lowering or a compilation has ended
event           the next compilation comes from the disk cache
ExecuteReplicated.__call__  a program runs from Python, usually only its first time
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import sys
import threading
from collections.abc import Sequence
from time import perf_counter
from types import CodeType, FrameType, MethodType
from typing import Any

from trainstep._common import user_code
from trainstep._common.import_hooks import Patches
from trainstep._doctor.hooks import flax
from trainstep._doctor.hooks.call_sites import called_by_trainstep, defined, frames_outward, site
from trainstep._doctor.hooks.function_identity import (
    FunctionObjects,
    arguments,
    code_of,
    display_name,
    new_object_cause,
    one_line,
    python_function,
)
from trainstep._doctor.hooks.keras import Keras, in_user_terms
from trainstep._doctor.hooks.nearest import STRUCTURE_LABEL, array_part, compare_with_earlier
from trainstep._doctor.hooks.watcher import OpenTrace, Watcher
from trainstep._doctor.records import Cause, Trace
from trainstep._explain.signature import Part, Signature

_PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
_DISK = "/jax/compilation_cache/cache_hits"
_TRACING = ("_trace_for_jit", "_create_pjit_jaxpr")
_DEEP = 12  # frames searched between a listener and the function that traces
_RECENT = 50
_LONG = 2000  # characters of a recorded signature
_EARLIER = 40  # signatures with which a new one is compared
_STATIC = re.compile(r"CustomNode\(Static\[.*?\], \[\]\)")
# The causes of a retrace with the same arguments.
_SETTING = Cause("context", "same arguments, different JAX configuration")
_BOUND = Cause("function", "each access to a method creates a new function object")


class _Pending:
    """A trace that JAX announced; it opens only if the user's Python really runs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.opened: OpenTrace | None = None
        self.error = sys.exception()  # an exception that the script handles already
        self.ran = False


class _ThreadState(threading.local):
    """The traces and compilations in progress in one thread."""

    def __init__(self) -> None:
        self.pending: list[_Pending] = []
        self.recent: list[tuple[str, Trace]] = []  # traced, to be compiled
        self.from_disk = False
        self.to_run: dict[str, Trace] = {}  # compiled, to be run


class Jax:
    """Hooks JAX."""

    def __init__(self, watcher: Watcher, keras: Keras) -> None:
        self._watcher, self._keras = watcher, keras
        self._thread = _ThreadState()
        self._objects = FunctionObjects()
        self._separate: set[tuple[str, int]] = set()  # of one code, but separate functions
        self._signatures: dict[tuple[str, int], list[tuple[Signature, int]]] = {}
        self._has_test_events = False

    def install(self, patches: Patches) -> None:
        """Installs the hooks when JAX is imported."""
        patches.on_import("jax.monitoring", functools.partial(self._hook_monitoring, patches))
        patches.on_import("jax._src.util", functools.partial(self._hook_test_events, patches))
        patches.on_import("jax._src.api", functools.partial(self._hook_gradients, patches))
        patches.on_import(
            "jax._src.interpreters.pxla", functools.partial(self._hook_first_run, patches)
        )

    def _hook_monitoring(self, patches: Patches, monitoring: Any) -> None:
        monitoring.register_event_duration_secs_listener(self._on_end)
        monitoring.register_scalar_listener(self._on_start)
        monitoring.register_event_listener(self._on_event)
        patches.undo_later(lambda: monitoring.unregister_event_listener(self._on_event))
        patches.undo_later(lambda: monitoring.unregister_scalar_listener(self._on_start))
        patches.undo_later(lambda: monitoring.unregister_event_duration_listener(self._on_end))

    def _hook_test_events(self, patches: Patches, util: Any) -> None:
        def make(before: Any) -> Any:
            def listener(name: str, *args: Any) -> None:
                if name == "trace_to_jaxpr":
                    self._python_runs(sys._getframe(1))
                if before is not None:
                    before(name, *args)

            return listener

        patches.replace(util, "test_event_listener", make)
        self._has_test_events = True

    def _hook_gradients(self, patches: Patches, api: Any) -> None:
        """Counts gradients outside of any trace."""

        def make(vjp: Any) -> Any:
            @functools.wraps(vjp)
            def counted(*args: Any, **kwargs: Any) -> Any:
                frame = sys._getframe(1)
                compiled = type(frame.f_locals.get("fun")).__name__ == "PjitFunction"
                if api.core.trace_state_clean() and not compiled:
                    self._watcher.guarded(lambda: self._keras.eager("jax", frame))
                return vjp(*args, **kwargs)

            return counted

        patches.replace(api, "vjp", make)

    def _hook_first_run(self, patches: Patches, pxla: Any) -> None:
        """Times the first run. JAX runs asynchronously: its results may still be computing."""

        def make(run: Any) -> Any:
            @functools.wraps(run)
            def timed(program: Any, *args: Any) -> Any:
                trace = self._thread.to_run.pop(_without_jit(program.name), None)
                if trace is None:
                    return run(program, *args)
                began = perf_counter()
                results = run(program, *args)
                trace.seconds["first_run"] = round(perf_counter() - began, 6)
                self._watcher.log.again(trace)
                return results

            return timed

        patches.replace(pxla.ExecuteReplicated, "__call__", make)

    # Events ---------------------------------------------------------------------------------

    def _on_start(self, event: str, value: float = 0.0, **details: Any) -> None:
        if _PHASES.get(event) == "trace":
            self._thread.pending.append(_Pending(str(details.get("fun_name"))))
            if not self._has_test_events:
                self._python_runs(sys._getframe(1))

    def _python_runs(self, frame: FrameType) -> None:
        """Opens the pending trace: its Python runs now."""
        pending = self._thread.pending[-1] if self._thread.pending else None
        if pending is not None and not pending.ran:
            pending.ran = True
            pending.opened = self._watcher.guarded(lambda: self._begin(frame, pending.name))

    def _on_end(self, event: str, seconds: float, **details: Any) -> None:
        phase = _PHASES.get(event)
        if phase is None:
            return
        if phase == "trace":
            pending = self._thread.pending.pop() if self._thread.pending else None
            if pending is not None and pending.opened is not None:
                self._watcher.guarded(functools.partial(self._traced, pending, seconds))
            return
        frame, name = sys._getframe(1), str(details.get("fun_name"))
        self._watcher.guarded(lambda: self._compiled(phase, frame, name, seconds))

    def _on_event(self, event: str, **details: Any) -> None:
        if event == _DISK:
            self._thread.from_disk = True

    def _begin(self, frame: FrameType, name: str) -> OpenTrace | None:
        near = itertools.islice(frames_outward(frame), _DEEP)
        tracing = next((f for f in near if f.f_code.co_name in _TRACING), None)
        if tracing is None or called_by_trainstep(frame):
            return None
        found = tracing.f_locals
        fun = found["fun"]
        raw = getattr(fun, "f", fun) if type(fun).__name__ == "WrappedFun" else fun
        fn = python_function(raw)
        module = flax.module_of(fn)
        code = code_of(fn) if module is None else flax.code_in(module)
        trace = Trace(engine="jax", function=name, called=site(frame))
        if code is not None:
            trace.function = display_name(raw) if module is None else flax.display_name(fn)
            trace.defined = defined(code)
        step = self._keras.step(code, frame, fn)
        users = module is not None or (code is not None and user_code.is_users_file(code))
        if step is None and not users:
            trace.what, trace.group, trace.function = "small", f"jax:{name}", name
            return self._watcher.begin(trace)
        given = flax.given(raw, frame)
        more = [] if step is None else step.parts()
        if given is not None and code is not None:
            more += flax.parts(code.co_varnames[: code.co_argcount], given)
        signature = _signature(found, code, more)
        trace.signature = str(signature)[:_LONG]
        number, new = self._objects.number(raw, trace.function)
        made: list[Cause] = []
        is_method = isinstance(raw, MethodType) and step is None
        if step is not None:
            step.describe(trace)
            made = step.causes(new=new)
        else:
            trace.group = f"jax:{trace.defined.file}:{trace.defined.line}:{trace.function}"
            if new and number > 1 and self._objects.is_separate_function(raw, trace.function):
                self._separate.add((trace.group, number))
            if (trace.group, number) in self._separate:
                trace.group += f"#{number}"
            elif new and number > 1 and self._watcher.is_outdated(trace.group, fn):
                trace.mode = f"values of trace {number}"  # needed: the old program has stale values
            elif new and number > 1:
                made = [new_object_cause(raw, number)]
        uses = step.uses if step is not None else lambda: [] if module is None else [module]
        values = _values(found, given)
        opened = self._watcher.begin(trace, fn, values, uses, raw)
        self._compare(trace, signature, number, made, _BOUND if is_method else _SETTING)
        if step is not None:
            trace.signature = in_user_terms(trace.signature)
            trace.causes = [Cause(kind, in_user_terms(text)) for kind, text in trace.causes]
        return opened

    def _compare(
        self, trace: Trace, signature: Signature, number: int, made: list[Cause], again: Cause
    ) -> None:
        earlier = self._signatures.setdefault((trace.group, number), [])
        if made:
            earlier.clear()
            trace.causes = made
        elif earlier:
            del earlier[:-_EARLIER]
            index, causes = compare_with_earlier(signature, [each for each, _ in earlier])
            trace.nearest = 0 if index is None else earlier[index][1]
            trace.causes = causes or [again]
        earlier.append((signature, trace.number))

    def _traced(self, pending: _Pending, seconds: float) -> None:
        assert pending.opened is not None
        trace, error = pending.opened.trace, sys.exception()
        trace.seconds["trace"] = round(seconds, 6)
        if error is not None and error is not pending.error:
            trace.failed = type(error).__name__
        self._watcher.end(pending.opened)
        self._watcher.check_jax(trace.group)
        self._thread.recent.append((pending.name, trace))
        del self._thread.recent[:-_RECENT]

    def _compiled(self, phase: str, frame: FrameType, name: str, seconds: float) -> None:
        if called_by_trainstep(frame):
            return
        name = _without_jit(name)
        for traced, trace in reversed(self._thread.recent):
            if traced == name and phase not in trace.seconds:
                break
        else:
            trace = self._untraced(name, frame)
            self._thread.recent.append((name, trace))
        trace.seconds[phase] = round(seconds, 6)
        if phase == "compile":
            trace.from_disk, self._thread.from_disk = self._thread.from_disk, False
            self._thread.to_run[name] = trace
        self._watcher.log.again(trace)

    def _untraced(self, name: str, frame: FrameType) -> Trace:
        """Records a compilation without a new trace."""
        known = [trace for traced, trace in self._thread.recent if traced == name]
        trace = Trace(engine="jax", group=f"jax:{name}", function=name, what="small")
        if known and known[-1].what == "trace" and _devices() > 1:
            first = known[-1]
            trace.group, trace.function, trace.what = first.group, first.function, "compile"
            trace.defined = first.defined
            text = f"same trace, different devices or options ({first.signature})"
            trace.causes = [Cause("sharding", text)]
        trace.called = site(frame)
        self._watcher.log.begin(trace)
        self._watcher.log.note(trace)
        return trace


def _without_jit(name: str) -> str:
    """The name in `jit(name)`."""
    return name[4:-1] if name.startswith("jit(") else name


def _devices() -> int:
    return int(sys.modules["jax"].device_count())


def _signature(found: dict[str, Any], code: CodeType | None, more: list[Part]) -> Signature:
    """The signature of a trace, from the locals of the frame that traces."""
    info, args, kwargs = found.get("ji"), found.get("args") or (), found.get("kwargs") or {}
    debug = found.get("dbg") or found.get("debug_info")
    names = list(getattr(debug, "arg_names", None) or ())
    called = code.co_varnames[: code.co_argcount] if code is not None else ()
    static: dict[str, Any] = {}
    for i in _static(info, "nums"):
        if -len(args) <= i < len(args):
            static[called[i] if len(called) == len(args) else f"number {i}"] = args[i]
    static |= {name: kwargs[name] for name in _static(info, "names") if name in kwargs}
    parts = [Part(name, one_line(value), "static", repr(value)) for name, value in static.items()]
    tree = _STATIC.sub("static", str(getattr(found.get("avals_ft"), "tree", "")))
    for index, aval in enumerate(found.get("avals") or found.get("in_type") or ()):
        label = names[index] if index < len(names) and names[index] else f"array {index}"
        label = _renamed(label, code)
        if not flax.is_part_of_module(label):
            parts.append(array_part(label, getattr(aval, "aval", aval)))
    return Signature([*parts, *more, Part(STRUCTURE_LABEL, _tree(tree), "structure", tree)])


def _renamed(label: str, code: CodeType | None) -> str:
    """The label of an array in a library's `*args`, with the name of the user's parameter."""
    passed = re.match(r"args\[(\d+)\]", label)
    if passed is None or code is None or code.co_flags & inspect.CO_VARARGS:
        return label
    names = [name for name in code.co_varnames[: code.co_argcount] if name != "self"]
    index = int(passed[1])
    return names[index] + label[passed.end() :] if index < len(names) else label


def _values(found: dict[str, Any], given: Sequence[Any] | None) -> list[Any]:
    """The arguments of a trace; those that are not static are marked as inputs."""
    from trainstep._surroundings.places import Given

    values = arguments(found if given is None else {"args": given})
    static = [i % len(values) for i in _static(found.get("ji"), "nums") if values]
    return [value if i in static else Given(value) for i, value in enumerate(values)]


def _static(info: Any, kind: str) -> tuple[Any, ...]:
    return tuple(getattr(info, f"static_arg{kind}", ()) or ())


def _tree(text: str) -> str:
    return text.removeprefix("PyTreeDef(").removesuffix(")")
