"""TensorFlow: hooks on traces, calls and gradients.

_create_concrete_function  runs on a cache miss: a trace; the caller's frame has its arguments
Function.__init__          a function object is created
Function._call             a call: counted, and the captured values are compared
load_ast                   AutoGraph generated code: maps its lines to the user's
GradientTape.gradient      a gradient outside of any function
"""

from __future__ import annotations

import functools
import itertools
import sys
from time import perf_counter
from types import CodeType, FrameType
from typing import Any

from trainstep._common import user_code
from trainstep._common.import_hooks import Patches
from trainstep._doctor.hooks import tensorflow_autograph
from trainstep._doctor.hooks.call_sites import called_by_trainstep, defined, frames_outward, site
from trainstep._doctor.hooks.function_identity import (
    arguments,
    code_of,
    new_object_cause,
    python_function,
)
from trainstep._doctor.hooks.keras import Keras, in_user_terms
from trainstep._doctor.hooks.nearest import compare_with_earlier
from trainstep._doctor.hooks.tensorflow_types import context_causes, relaxed, signature
from trainstep._doctor.hooks.tensorflow_xla import XlaCompilations, XlaPrograms
from trainstep._doctor.hooks.watcher import CapturedValues, OpenTrace, Watcher, weak
from trainstep._doctor.records import Calls, Cause, Site, Trace

_POLYMORPHIC = "tensorflow.python.eager.polymorphic_function"
_BINDING = ("__get__", "class_method_to_instance_method")
_TIMES = 2000  # stored call times per function
_EARLIER = 8  # earlier function objects that are checked for later calls


class FunctionObject:
    """The state of one function object, stored on it; `known` lists all objects of its code."""

    def __init__(
        self, where: Site, known: list[FunctionObject], programs: XlaPrograms, *, bound: bool
    ) -> None:
        self.where, self.known, self.bound = where, known, bound
        self.xla_programs = programs
        self.calls = 0
        self.group = ""
        self.kept: CapturedValues | None = None
        self.traces: list[int] = []  # their numbers
        self.times: list[float] = []


class TensorFlow:
    """Hooks TensorFlow."""

    def __init__(self, watcher: Watcher, keras: Keras) -> None:
        self._watcher, self._keras = watcher, keras
        self.xla = XlaCompilations(watcher)
        self._tracing_for: dict[int, FunctionObject] = {}  # by the number of the open trace
        self._made: dict[tuple[CodeType | None, bool], list[FunctionObject]] = {}
        self._replaced: list[tuple[Trace, list[tuple[FunctionObject, int]]]] = []

    def install(self, patches: Patches) -> None:
        """Installs the hooks when TensorFlow is imported."""
        hooks = {
            f"{_POLYMORPHIC}.tracing_compilation": self._hook_tracing,
            f"{_POLYMORPHIC}.polymorphic_function": self._hook_functions,
            "tensorflow.python.eager.backprop": self._hook_gradients,
        }
        for module, hook in hooks.items():
            patches.on_import(module, functools.partial(hook, patches))
        tensorflow_autograph.install(patches)

    def finish(self) -> None:
        """Records the number of calls per function."""
        for trace, earlier in self._replaced:
            if any(made.calls > calls for made, calls in earlier):
                # The earlier object was called again: two functions, each with a first trace.
                trace.causes, trace.mode = [], f"object {trace.number}"
                self._watcher.log.again(trace)
        counts: dict[str, Calls] = {}
        for made in (each for known in self._made.values() for each in known):
            if made.group and made.calls:
                calls = counts.setdefault(made.group, Calls(group=made.group))
                calls.count += made.calls
                calls.times = sorted([*calls.times, *made.times])[:_TIMES]
        for calls in counts.values():
            self._watcher.log.note(calls)

    # Hooks ----------------------------------------------------------------------------------

    def _hook_tracing(self, patches: Patches, module: Any) -> None:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def _create_concrete_function(*args: Any, **kwargs: Any) -> Any:
                if not self._watcher.active:
                    return original(*args, **kwargs)
                frame = sys._getframe(1)
                begun = self._watcher.guarded(lambda: self._begin(frame, args, kwargs))
                began, program = perf_counter(), None
                try:
                    program = original(*args, **kwargs)
                    return program
                finally:
                    seconds = perf_counter() - began
                    if begun is not None:
                        self._watcher.guarded(lambda: self._end(*begun, program, seconds))

            return _create_concrete_function

        patches.replace(module, "_create_concrete_function", make)

    def _hook_functions(self, patches: Patches, module: Any) -> None:
        def init(original: Any) -> Any:
            @functools.wraps(original)
            def __init__(fn: Any, *args: Any, **kwargs: Any) -> None:
                original(fn, *args, **kwargs)
                frame = sys._getframe(1)
                self._watcher.guarded(lambda: self._note_function_object(fn, frame))

            return __init__

        def call(original: Any) -> Any:
            @functools.wraps(original)
            def _call(fn: Any, *args: Any, **kwargs: Any) -> Any:
                made = fn.__dict__.get("_trainstep_made")
                if made is None:
                    return original(fn, *args, **kwargs)
                if opened := self._watcher.open_traces():  # inlined into another function
                    result = original(fn, *args, **kwargs)
                    outer = self._outermost()
                    if outer is not None:
                        self.xla.called_inside(made.xla_programs, outer, opened[0].trace.function)
                    return result
                made.calls += 1
                if len(made.times) < _TIMES:
                    made.times.append(self._watcher.log.elapsed())
                traced = len(made.traces)
                if made.xla_programs.jit_compile:
                    result = self.xla.call(made.xla_programs, original, fn, args, kwargs)
                else:
                    result = original(fn, *args, **kwargs)
                kept = made.kept
                if kept is not None and traced == len(made.traces) and not kept.holds():
                    noticed = functools.partial(site, sys._getframe(1))
                    self._watcher.guarded(lambda: self._watcher.check(kept, noticed))
                return result

            return _call

        patches.replace(module.Function, "__init__", init)
        patches.replace(module.Function, "_call", call)

    def _hook_gradients(self, patches: Patches, module: Any) -> None:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def gradient(tape: Any, *args: Any, **kwargs: Any) -> Any:
                if module.context.executing_eagerly():
                    self._note_eager_functions()
                    frame = sys._getframe(1)
                    self._watcher.guarded(lambda: self._keras.eager("tensorflow", frame))
                return original(tape, *args, **kwargs)

            return gradient

        patches.replace(module.GradientTape, "gradient", make)

    def _note_eager_functions(self) -> None:
        """Records that the script switched compilation off."""
        module = sys.modules.get(f"{_POLYMORPHIC}.eager_function_run")
        if getattr(module, "RUN_FUNCTIONS_EAGERLY", False):
            self._watcher.note_once(
                "tf.config.run_functions_eagerly(True) was called: no tf.function is compiled"
            )

    # Functions ------------------------------------------------------------------------------

    def _note_function_object(self, fn: Any, frame: FrameType) -> None:
        code = code_of(python_function(fn._python_function))
        near = itertools.islice(frames_outward(frame), 3)
        bound = any(each.f_code.co_name in _BINDING for each in near)
        known = self._made.setdefault((code, bound), [])
        programs = XlaPrograms(jit_compile=bool(fn._jit_compile))
        made = FunctionObject(site(frame), known, programs, bound=bound)
        known.append(made)
        fn._trainstep_made = made
        fn._function_captures._trainstep_owner = weak(fn)

    def _begin(
        self, frame: FrameType, args: Any, kwargs: Any
    ) -> tuple[OpenTrace, FunctionObject | None] | None:
        if called_by_trainstep(frame):
            return None
        options = kwargs.get("tracing_options", args[3] if len(args) > 3 else None)
        kind = kwargs.get("function_type", args[0] if args else None)
        owner = getattr(options.function_captures, "_trainstep_owner", lambda: None)()
        fn = python_function(options.python_function if owner is None else owner._python_function)
        code = code_of(fn)
        made: FunctionObject | None = getattr(owner, "_trainstep_made", None)
        trace = Trace(engine="tensorflow", function=options.name, called=site(frame))
        if code is not None:
            trace.function, trace.defined = code.co_qualname, defined(code)
        step = self._keras.step(code, frame, fn)
        if step is None and (code is None or not user_code.is_users_file(code)):
            trace.what, trace.group, trace.function = "small", "tensorflow", options.name
            # tf.data's functions, for example: side effects of user code inside are still observed.
            return self._watcher.begin(trace, fn), None
        found = frame.f_locals
        asked = found["lookup_func_type"]
        trace.signature = str(signature(asked))
        if step is not None:
            step.describe(trace)
        else:
            trace.group = f"tensorflow:{trace.defined.file}:{trace.defined.line}:{trace.function}"
        trace.causes = self._causes(trace, found, options, made, fn)
        if asked != kind:
            wider = relaxed(kind, asked)
            trace.note = f"TensorFlow traced a version with dynamic sizes: {wider}"
        if step is not None:
            if (
                not self._watcher.open_traces()
            ):  # Keras's functions are nested; only the outermost counts
                again = step.causes(new=made is not None and not made.traces)
                trace.causes = trace.causes or again
            trace.signature, trace.note = in_user_terms(trace.signature), in_user_terms(trace.note)
            trace.causes = [Cause(kind, in_user_terms(text)) for kind, text in trace.causes]
        uses = list if step is None else step.uses
        opened = self._watcher.begin(trace, fn, arguments(found), uses)
        self.xla.traces_by_name[options.name] = trace
        if made is not None:
            self._tracing_for[trace.number] = made
            made.traces.append(trace.number)
            made.group = trace.group
        return opened, made

    def _causes(
        self,
        trace: Trace,
        found: dict[str, Any],
        options: Any,
        made: FunctionObject | None,
        fn: Any,
    ) -> list[Cause]:
        """The causes: differences from the signatures in the function's cache."""
        asked, context = found["lookup_func_type"], found["current_func_context"]
        cache = options.function_cache
        known = list(cache._primary) if cache is not None else []
        same = [(i, each) for i, (where, each) in enumerate(known) if where == context]
        traced = [] if made is None else made.traces
        if same:
            index, causes = compare_with_earlier(
                signature(asked), [signature(each) for _, each in same]
            )
            if index is not None and same[index][0] < len(traced):
                trace.nearest = traced[same[index][0]]
            return causes
        if known or traced:
            return context_causes(context, [where for where, _ in known])
        if trace.group.startswith("tensorflow:") and made is not None:
            return self._new_object_causes(trace, made, fn)
        return []

    def _new_object_causes(self, trace: Trace, made: FunctionObject, fn: Any) -> list[Cause]:
        """The cause for a further function object of the same code."""
        earlier = [each for each in made.known if each is not made and each.calls]
        if not earlier:
            return []
        self._replaced.append((trace, [(each, each.calls) for each in earlier[-_EARLIER:]]))
        called = "called" if made.bound else "created"
        line = user_code.name(*made.where[:2])
        return [new_object_cause(fn, len(earlier) + 1, f", {called} at {line}")]

    def _end(
        self, opened: OpenTrace, made: FunctionObject | None, program: Any, seconds: float
    ) -> None:
        trace = opened.trace
        trace.seconds["trace"] = round(seconds, 6)
        self._tracing_for.pop(trace.number, None)
        if program is None:
            error = sys.exception()
            trace.failed = type(error).__name__ if error is not None else "error"
        kept = self._watcher.end(opened)
        if made is not None and kept is not None:
            made.kept = kept
        if program is not None and made is not None:
            self.xla.traced(trace, made.xla_programs, program)
        if program is not None and not trace.inside:
            self._time_first_run(program, trace)

    def _outermost(self) -> XlaPrograms | None:
        """The XLA programs of the outermost function that this thread traces."""
        stack = self._watcher.open_traces()
        made = self._tracing_for.get(stack[0].trace.number) if stack else None
        return None if made is None else made.xla_programs

    def _time_first_run(self, program: Any, trace: Trace) -> None:
        """Times the first run, which also optimizes and compiles, less the time of the second."""
        run = program._call_flat
        times: list[float] = []

        def _call_flat(*args: Any, **kwargs: Any) -> Any:
            began = perf_counter()
            result = run(*args, **kwargs)
            times.append(perf_counter() - began)
            if len(times) == 2:
                vars(program).pop("_call_flat", None)
            trace.seconds["first_run"] = round(max(times[0] - sum(times[1:]), 0.0), 6)
            self._watcher.log.again(trace)
            return result

        program._call_flat = _call_flat
