"""TensorFlow: the one function that runs on a cache miss, and the call of a function.

_create_concrete_function  a trace; its caller's frame tells for what
Function.__init__          a function object is made
Function._call             it is called: counted, and what it took from around it is compared
load_ast                   AutoGraph wrote code: which of its lines is which of the user's
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
from trainstep._doctor.hooks.call_sites import defined, is_ours, outwards, site
from trainstep._doctor.hooks.function_identity import another, arguments, code_of, innermost
from trainstep._doctor.hooks.keras import Keras, in_words
from trainstep._doctor.hooks.nearest import why
from trainstep._doctor.hooks.tensorflow_types import context_causes, relaxed, signature
from trainstep._doctor.hooks.tensorflow_xla import XlaCompilations, XlaPrograms
from trainstep._doctor.hooks.watcher import Kept, Open, Watcher, weak
from trainstep._doctor.records import Calls, Cause, Site, Trace

_POLYMORPHIC = "tensorflow.python.eager.polymorphic_function"
_BINDING = ("__get__", "class_method_to_instance_method")
_TIMES = 2000  # moments of calls that are kept
_EARLIER = 8  # function objects that may still be in use


class Made:
    """What is known of one function object, with the others of its code. Does not hold it."""

    def __init__(
        self, where: Site, known: list[Made], programs: XlaPrograms, *, bound: bool
    ) -> None:
        self.where, self.known, self.bound = where, known, bound
        self.xla_programs = programs
        self.calls = 0
        self.group = ""
        self.kept: Kept | None = None
        self.traces: list[int] = []  # the numbers of its traces
        self.times: list[float] = []


class TensorFlow:
    """Watches TensorFlow."""

    def __init__(self, watcher: Watcher, keras: Keras) -> None:
        self._watcher, self._keras = watcher, keras
        self.xla = XlaCompilations(watcher)
        self._tracing_for: dict[int, Made] = {}  # by the numbers of traces that are open
        self._made: dict[tuple[CodeType | None, bool], list[Made]] = {}
        self._replaced: list[tuple[Trace, list[tuple[Made, int]]]] = []

    def install(self, patches: Patches) -> None:
        """Hooks TensorFlow when it is imported."""
        hooks = {
            f"{_POLYMORPHIC}.tracing_compilation": self._tracing,
            f"{_POLYMORPHIC}.polymorphic_function": self._functions,
            "tensorflow.python.eager.backprop": self._eager,
        }
        for module, hook in hooks.items():
            patches.on_import(module, functools.partial(hook, patches))
        tensorflow_autograph.install(patches)

    def finish(self) -> None:
        """Notes how often functions were called."""
        for trace, earlier in self._replaced:
            if any(made.calls > calls for made, calls in earlier):
                # The earlier object is in use as well: two functions, each with its first trace.
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

    def _tracing(self, patches: Patches, module: Any) -> None:
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

    def _functions(self, patches: Patches, module: Any) -> None:
        def init(original: Any) -> Any:
            @functools.wraps(original)
            def __init__(fn: Any, *args: Any, **kwargs: Any) -> None:
                original(fn, *args, **kwargs)
                frame = sys._getframe(1)
                self._watcher.guarded(lambda: self._note_made(fn, frame))

            return __init__

        def call(original: Any) -> Any:
            @functools.wraps(original)
            def _call(fn: Any, *args: Any, **kwargs: Any) -> Any:
                made = fn.__dict__.get("_trainstep_made")
                if made is None:
                    return original(fn, *args, **kwargs)
                if opened := self._watcher.open_traces():  # part of another function
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

    def _eager(self, patches: Patches, module: Any) -> None:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def gradient(tape: Any, *args: Any, **kwargs: Any) -> Any:
                if module.context.executing_eagerly():
                    self._uncompiled()
                    frame = sys._getframe(1)
                    self._watcher.guarded(lambda: self._keras.eager("tensorflow", frame))
                return original(tape, *args, **kwargs)

            return gradient

        patches.replace(module.GradientTape, "gradient", make)

    def _uncompiled(self) -> None:
        """Says so if functions are told not to be compiled."""
        module = sys.modules.get(f"{_POLYMORPHIC}.eager_function_run")
        if getattr(module, "RUN_FUNCTIONS_EAGERLY", False):
            self._watcher.remark(
                "tf.config.run_functions_eagerly(True) was called: no tf.function is compiled"
            )

    # Functions ------------------------------------------------------------------------------

    def _note_made(self, fn: Any, frame: FrameType) -> None:
        code = code_of(innermost(fn._python_function))
        near = itertools.islice(outwards(frame), 3)
        bound = any(each.f_code.co_name in _BINDING for each in near)
        known = self._made.setdefault((code, bound), [])
        programs = XlaPrograms(jit_compile=bool(fn._jit_compile))
        made = Made(site(frame), known, programs, bound=bound)
        known.append(made)
        fn._trainstep_made = made
        fn._function_captures._trainstep_owner = weak(fn)

    def _begin(self, frame: FrameType, args: Any, kwargs: Any) -> tuple[Open, Made | None] | None:
        if is_ours(frame):
            return None
        options = kwargs.get("tracing_options", args[3] if len(args) > 3 else None)
        kind = kwargs.get("function_type", args[0] if args else None)
        owner = getattr(options.function_captures, "_trainstep_owner", lambda: None)()
        fn = innermost(options.python_function if owner is None else owner._python_function)
        code = code_of(fn)
        made: Made | None = getattr(owner, "_trainstep_made", None)
        trace = Trace(engine="tensorflow", function=options.name, called=site(frame))
        if code is not None:
            trace.function, trace.defined = code.co_qualname, defined(code)
        step = self._keras.step(code, frame, fn)
        if step is None and (code is None or not user_code.is_users_file(code)):
            trace.what, trace.group, trace.function = "small", "tensorflow", options.name
            # Of tf.data's, say: what they call of the user's is heard, though not read.
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
            trace.note = f"TensorFlow then traced a version for any such size: {wider}"
        if step is not None:
            if not self._watcher.open_traces():  # Keras's functions are nested
                again = step.causes(new=made is not None and not made.traces)
                trace.causes = trace.causes or again
            trace.signature, trace.note = in_words(trace.signature), in_words(trace.note)
            trace.causes = [Cause(kind, in_words(text)) for kind, text in trace.causes]
        uses = list if step is None else step.uses
        opened = self._watcher.begin(trace, fn, arguments(found), uses)
        self.xla.traces_by_name[options.name] = trace
        if made is not None:
            self._tracing_for[trace.number] = made
            made.traces.append(trace.number)
            made.group = trace.group
        return opened, made

    def _causes(
        self, trace: Trace, found: dict[str, Any], options: Any, made: Made | None, fn: Any
    ) -> list[Cause]:
        """Why it is traced: against the types that it was traced for."""
        asked, context = found["lookup_func_type"], found["current_func_context"]
        cache = options.function_cache
        known = list(cache._primary) if cache is not None else []
        same = [(i, each) for i, (where, each) in enumerate(known) if where == context]
        traced = [] if made is None else made.traces
        if same:
            index, causes = why(signature(asked), [signature(each) for _, each in same])
            if index is not None and same[index][0] < len(traced):
                trace.nearest = traced[same[index][0]]
            return causes
        if known or traced:
            return context_causes(context, [where for where, _ in known])
        if trace.group.startswith("tensorflow:") and made is not None:
            return self._another(trace, made, fn)
        return []

    def _another(self, trace: Trace, made: Made, fn: Any) -> list[Cause]:
        """A further function object of one code, if there were others."""
        earlier = [each for each in made.known if each is not made and each.calls]
        if not earlier:
            return []
        self._replaced.append((trace, [(each, each.calls) for each in earlier[-_EARLIER:]]))
        called = "called" if made.bound else "made"
        line = user_code.name(*made.where[:2])
        return [another(fn, len(earlier) + 1, f", {called} at {line}")]

    def _end(self, opened: Open, made: Made | None, program: Any, seconds: float) -> None:
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
        """Those of the outermost function that is being traced in this thread."""
        stack = self._watcher.open_traces()
        made = self._tracing_for.get(stack[0].trace.number) if stack else None
        return None if made is None else made.xla_programs

    def _time_first_run(self, program: Any, trace: Trace) -> None:
        """The first run optimizes the graph, and may compile it; the second tells by how much."""
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
