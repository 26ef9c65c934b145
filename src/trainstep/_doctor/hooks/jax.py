"""JAX: its own listeners tell of every trace and compilation, and cost nothing when there is none.

scalar event    a trace begins: the frames below tell of which function, for what
test event      the user's Python is really run, and not found again in JAX's cache
duration event  a trace, a lowering or a compilation has ended
event           the next compilation comes from the cache on disk
ExecuteReplicated.__call__  a program is run from Python: the first time, as a rule, and no more
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
from trainstep._doctor.hooks.call_sites import defined, is_ours, outwards, site
from trainstep._doctor.hooks.function_identity import (
    Objects,
    another,
    arguments,
    code_of,
    innermost,
    short,
    title,
)
from trainstep._doctor.hooks.keras import Keras, in_words
from trainstep._doctor.hooks.nearest import WHOLE, array, why
from trainstep._doctor.hooks.watcher import Open, Watcher
from trainstep._doctor.records import Cause, Trace
from trainstep._explain.signature import Part, Signature

_PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
_DISK = "/jax/compilation_cache/cache_hits"
_TRACING = ("_trace_for_jit", "_create_pjit_jaxpr")
_DEEP = 12  # frames between a listener and the function that traces
_RECENT = 50
_LONG = 2000  # characters of a signature
_EARLIER = 40  # signatures that a new one is compared with
_STATIC = re.compile(r"CustomNode\(Static\[.*?\], \[\]\)")
# Why a function is traced again for the same arguments.
_SETTING = Cause("context", "the same arguments under another setting")
_BOUND = Cause("function", "a method is a new function object each time it is asked for")


class _Pending:
    """A trace that JAX has announced, and that begins if its Python is really run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.opened: Open | None = None
        self.error = sys.exception()  # that the script is handling already
        self.ran = False


class _Thread(threading.local):
    """What is under way in one thread."""

    def __init__(self) -> None:
        self.pending: list[_Pending] = []
        self.recent: list[tuple[str, Trace]] = []  # traced, and not compiled yet
        self.from_disk = False
        self.to_run: dict[str, Trace] = {}  # compiled, and not run yet


class Jax:
    """Watches JAX."""

    def __init__(self, watcher: Watcher, keras: Keras) -> None:
        self._watcher, self._keras = watcher, keras
        self._thread = _Thread()
        self._objects = Objects()
        self._own: set[tuple[str, int]] = set()  # objects that are functions in their own right
        self._signatures: dict[tuple[str, int], list[tuple[Signature, int]]] = {}
        self._hears = False

    def install(self, patches: Patches) -> None:
        """Hooks JAX when it is imported."""
        patches.on_import("jax.monitoring", functools.partial(self._listen, patches))
        patches.on_import("jax._src.util", functools.partial(self._hear, patches))
        patches.on_import("jax._src.api", functools.partial(self._eager, patches))
        patches.on_import("jax._src.interpreters.pxla", functools.partial(self._run, patches))

    def _listen(self, patches: Patches, monitoring: Any) -> None:
        monitoring.register_event_duration_secs_listener(self._ended)
        monitoring.register_scalar_listener(self._began)
        monitoring.register_event_listener(self._happened)
        patches.undo_later(lambda: monitoring.unregister_event_listener(self._happened))
        patches.undo_later(lambda: monitoring.unregister_scalar_listener(self._began))
        patches.undo_later(lambda: monitoring.unregister_event_duration_listener(self._ended))

    def _hear(self, patches: Patches, util: Any) -> None:
        def make(before: Any) -> Any:
            def heard(name: str, *args: Any) -> None:
                if name == "trace_to_jaxpr":
                    self._runs(sys._getframe(1))
                if before is not None:
                    before(name, *args)

            return heard

        patches.replace(util, "test_event_listener", make)
        self._hears = True

    def _eager(self, patches: Patches, api: Any) -> None:
        """Gradients outside of any trace."""

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

    def _run(self, patches: Patches, pxla: Any) -> None:
        """The first run, until JAX hands over its results, which may be under way still."""

        def make(run: Any) -> Any:
            @functools.wraps(run)
            def timed(program: Any, *args: Any) -> Any:
                trace = self._thread.to_run.pop(_bare(program.name), None)
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

    def _began(self, event: str, value: float = 0.0, **details: Any) -> None:
        if _PHASES.get(event) == "trace":
            self._thread.pending.append(_Pending(str(details.get("fun_name"))))
            if not self._hears:
                self._runs(sys._getframe(1))

    def _runs(self, frame: FrameType) -> None:
        """The Python of a function is run now."""
        pending = self._thread.pending[-1] if self._thread.pending else None
        if pending is not None and not pending.ran:
            pending.ran = True
            pending.opened = self._watcher.guarded(lambda: self._begin(frame, pending.name))

    def _ended(self, event: str, seconds: float, **details: Any) -> None:
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

    def _happened(self, event: str, **details: Any) -> None:
        if event == _DISK:
            self._thread.from_disk = True

    def _begin(self, frame: FrameType, name: str) -> Open | None:
        near = itertools.islice(outwards(frame), _DEEP)
        tracing = next((f for f in near if f.f_code.co_name in _TRACING), None)
        if tracing is None or is_ours(frame):
            return None
        found = tracing.f_locals
        fun = found["fun"]
        raw = getattr(fun, "f", fun) if type(fun).__name__ == "WrappedFun" else fun
        fn = innermost(raw)
        module = flax.module_of(fn)
        code = code_of(fn) if module is None else flax.code_in(module)
        trace = Trace(engine="jax", function=name, called=site(frame))
        if code is not None:
            trace.function = title(raw) if module is None else flax.title(fn)
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
            if new and number > 1 and self._objects.is_own(raw, trace.function):
                self._own.add((trace.group, number))
            if (trace.group, number) in self._own:
                trace.group += f"#{number}"
            elif new and number > 1 and self._watcher.is_outdated(trace.group, fn):
                trace.mode = f"values of trace {number}"  # in the old program, they were stale
            elif new and number > 1:
                made = [another(raw, number)]
        uses = step.uses if step is not None else lambda: [] if module is None else [module]
        values = _values(found, given)
        opened = self._watcher.begin(trace, fn, values, uses, raw)
        self._compare(trace, signature, number, made, _BOUND if is_method else _SETTING)
        if step is not None:
            trace.signature = in_words(trace.signature)
            trace.causes = [Cause(kind, in_words(text)) for kind, text in trace.causes]
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
            index, causes = why(signature, [each for each, _ in earlier])
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
        if is_ours(frame):
            return
        name = _bare(name)
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
        """A program of what was traced before, or was traced without being announced."""
        known = [trace for traced, trace in self._thread.recent if traced == name]
        trace = Trace(engine="jax", group=f"jax:{name}", function=name, what="small")
        if known and known[-1].what == "trace" and _devices() > 1:
            first = known[-1]
            trace.group, trace.function, trace.what = first.group, first.function, "compile"
            trace.defined = first.defined
            text = f"the same trace, for other devices or options ({first.signature})"
            trace.causes = [Cause("sharding", text)]
        trace.called = site(frame)
        self._watcher.log.begin(trace)
        self._watcher.log.note(trace)
        return trace


def _bare(name: str) -> str:
    """The name of a function, out of `jit(name)`."""
    return name[4:-1] if name.startswith("jit(") else name


def _devices() -> int:
    return int(sys.modules["jax"].device_count())


def _signature(found: dict[str, Any], code: CodeType | None, more: list[Part]) -> Signature:
    """What a trace is for, out of the frame that makes it."""
    info, args, kwargs = found.get("ji"), found.get("args") or (), found.get("kwargs") or {}
    debug = found.get("dbg") or found.get("debug_info")
    names = list(getattr(debug, "arg_names", None) or ())
    called = code.co_varnames[: code.co_argcount] if code is not None else ()
    static: dict[str, Any] = {}
    for i in _static(info, "nums"):
        if -len(args) <= i < len(args):
            static[called[i] if len(called) == len(args) else f"number {i}"] = args[i]
    static |= {name: kwargs[name] for name in _static(info, "names") if name in kwargs}
    parts = [Part(name, short(value), "static", repr(value)) for name, value in static.items()]
    tree = _STATIC.sub("static", str(getattr(found.get("avals_ft"), "tree", "")))
    for index, aval in enumerate(found.get("avals") or found.get("in_type") or ()):
        label = names[index] if index < len(names) and names[index] else f"array {index}"
        label = _renamed(label, code)
        if not flax.is_taken_apart(label):
            parts.append(array(label, getattr(aval, "aval", aval)))
    return Signature([*parts, *more, Part(WHOLE, _tree(tree), "structure", tree)])


def _renamed(label: str, code: CodeType | None) -> str:
    """An array of a library's `*args`, which hands them to the user's code under a name."""
    passed = re.match(r"args\[(\d+)\]", label)
    if passed is None or code is None or code.co_flags & inspect.CO_VARARGS:
        return label
    names = [name for name in code.co_varnames[: code.co_argcount] if name != "self"]
    index = int(passed[1])
    return names[index] + label[passed.end() :] if index < len(names) else label


def _values(found: dict[str, Any], given: Sequence[Any] | None) -> list[Any]:
    """The arguments of a trace; of those that are not static, the parts are inputs."""
    from trainstep._surroundings.places import Given

    values = arguments(found if given is None else {"args": given})
    static = [i % len(values) for i in _static(found.get("ji"), "nums") if values]
    return [value if i in static else Given(value) for i, value in enumerate(values)]


def _static(info: Any, kind: str) -> tuple[Any, ...]:
    return tuple(getattr(info, f"static_arg{kind}", ()) or ())


def _tree(text: str) -> str:
    return text.removeprefix("PyTreeDef(").removesuffix(")")
