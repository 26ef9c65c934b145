"""PyTorch: hooks on dynamo, which compiles a frame when no earlier program fits.

_compile                        compiles a frame; its arguments have the code and the values
...recompilation_reasons        the guards of earlier programs that failed
exceeds_recompile_limit         PyTorch stops compiling a function
callbacks                       a backward program is compiled, at its first run
torch.autograd.graph.log        its level is read at every gradient
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import time
from types import FrameType
from typing import Any

from trainstep._common import user_code
from trainstep._common.import_hooks import Patches
from trainstep._doctor.hooks.call_sites import called_by_trainstep, defined, site
from trainstep._doctor.hooks.function_identity import code_of, python_function
from trainstep._doctor.hooks.keras import Keras, is_keras_code
from trainstep._doctor.hooks.torch_breaks import Breaks
from trainstep._doctor.hooks.torch_eager import TorchGradients
from trainstep._doctor.hooks.torch_frames import Codes, entry_frame, mode, scope_of, signature
from trainstep._doctor.hooks.torch_guards import becomes_dynamic, cause, reasons
from trainstep._doctor.hooks.torch_history import History, Program
from trainstep._doctor.hooks.torch_metrics import leaves_mark, measure, metrics_of, time_first_run
from trainstep._doctor.hooks.torch_paths import Scope
from trainstep._doctor.hooks.watcher import OpenTrace, Watcher
from trainstep._doctor.records import Incident, Trace

_OWN_ERROR = "Observed exception"  # PyTorch's name for an exception of the user's code
_FIRST = ("shape", "dtype", "mode")  # causes that say more than "Keras rebuilt its function"


class _Compiling:
    """A frame that is being compiled."""

    def __init__(self, opened: OpenTrace, program: Program, scope: Scope, replaces: str) -> None:
        self.opened, self.program, self.replaces = opened, program, replaces
        self.scope: Scope | None = scope
        self.code = scope.code
        self.number = ""  # the compile id of PyTorch
        self.failed_guards: list[str] = []
        self.breaks = 0  # graph breaks before it
        self.varies = False  # whether a size that changed becomes dynamic
        self.is_whole = False  # fullgraph=True: a graph break is an error
        self.given_up = False
        self.began = time.perf_counter()


class _ThreadState(threading.local):
    """The compilations in progress in one thread."""

    def __init__(self) -> None:
        self.compiling: list[_Compiling] = []
        self.backward: dict[str, float] = {}


class Torch:
    """Hooks PyTorch."""

    def __init__(self, watcher: Watcher, keras: Keras) -> None:
        self._watcher, self._keras = watcher, keras
        self._thread = _ThreadState()
        self._codes, self._history = Codes(), History()
        self._breaks = Breaks(watcher)
        self._gradients = TorchGradients(watcher, keras.eager, lambda: self._some_unmarked)
        self._some_unmarked = False  # whether a backend leaves no mark in the graph of a loss

    def install(self, patches: Patches) -> None:
        """Installs the hooks when PyTorch and its compiler are imported."""
        convert = "torch._dynamo.convert_frame"
        for hook in (self._hook_compile, self._hook_reasons, self._hook_limit):
            patches.on_import(convert, functools.partial(hook, patches))
        patches.on_import(
            "torch._dynamo.callback", functools.partial(self._hook_callbacks, patches)
        )
        patches.on_import("torch.autograd", functools.partial(self._gradients.install, patches))

    def finish(self) -> None:
        """Drops all references; every record was written when it occurred."""
        self._codes, self._history = Codes(), History()

    # Hooks ----------------------------------------------------------------------------------

    def _hook_compile(self, patches: Patches, module: Any) -> None:
        parameters = inspect.signature(module._compile)
        for name in ("code", "globals", "locals", "compile_id"):
            parameters.parameters[name]  # raises, and so is reported, in a version without them

        def make(original: Any) -> Any:
            @functools.wraps(original)
            def _compile(*args: Any, **kwargs: Any) -> Any:
                if not self._watcher.active:
                    return original(*args, **kwargs)
                frame = sys._getframe(1)
                begin = functools.partial(self._begin, frame, parameters, args, kwargs)
                compiling = self._watcher.guarded(begin)
                del begin
                if "skip" in kwargs:  # the number of frames that PyTorch hides in its messages
                    kwargs["skip"] += 1
                result = None
                try:
                    result = original(*args, **kwargs)
                    return result
                finally:
                    if compiling is not None:
                        end = functools.partial(self._end, compiling, result)
                        self._watcher.guarded(end)

            return _compile

        patches.replace(module, "_compile", make)

    def _hook_reasons(self, patches: Patches, module: Any) -> None:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def recorded(*args: Any, **kwargs: Any) -> Any:
                found = original(*args, **kwargs)
                if self._thread.compiling:
                    self._thread.compiling[-1].failed_guards = list(found)
                return found

            return recorded

        patches.replace(module, "get_and_maybe_log_recompilation_reasons", make)

    def _hook_limit(self, patches: Patches, module: Any) -> None:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def exceeds(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                if result[0] and self._thread.compiling:
                    limit = functools.partial(self._give_up, module.config, result[1])
                    self._watcher.guarded(limit)
                return result

            return exceeds

        patches.replace(module, "exceeds_recompile_limit", make)

    def _hook_callbacks(self, patches: Patches, module: Any) -> None:
        handler = module.callback_handler

        def clear(original: Any) -> Any:
            @functools.wraps(original)
            def cleared() -> None:  # `torch._dynamo.reset()` calls it
                original()
                self._register(handler)
                frame = sys._getframe(1)
                self._watcher.guarded(lambda: self._history.reset(site(frame)))

            return cleared

        self._register(handler)
        patches.replace(handler, "clear", clear)
        patches.undo_later(lambda: handler.remove_start_callback(self._backward_began))
        patches.undo_later(lambda: handler.remove_end_callback(self._backward_ended))

    def _register(self, handler: Any) -> None:
        handler.register_start_callback(self._backward_began)
        handler.register_end_callback(self._backward_ended)

    # Frames ---------------------------------------------------------------------------------

    def _begin(
        self, frame: FrameType, parameters: inspect.Signature, args: Any, kwargs: Any
    ) -> _Compiling | None:
        if called_by_trainstep(frame):
            return None
        given = parameters.bind(*args, **kwargs).arguments
        code, local = given["code"], given["locals"]
        torch, entry = sys.modules["torch"], entry_frame(frame)
        subject = self._codes.subject(code, local, entry)
        scope = scope_of(subject, code, local, given["globals"])
        trace = Trace(engine="torch", function=subject.code.co_qualname)
        trace.defined = defined(subject.code)
        trace.called = site(frame if entry is None or not subject.line else entry.f_back)
        name = f"torch:{trace.defined.file}:{trace.defined.line}:{trace.function}"
        trace.group, is_new, replaces = self._history.identity(subject, name)
        modes = [mode(torch, subject, scope, local), self._codes.part(subject, code)]
        if subject.line:
            trace.note = f"the part after the graph break at line {subject.line}"
        self._describe(trace, modes, entry, is_new=is_new)
        seen = signature(scope, local)
        trace.signature = str(seen)
        self._some_unmarked = self._some_unmarked or not leaves_mark(given.get("compiler_fn"))
        compiling = _Compiling(self._watcher.begin(trace), Program(trace, seen), scope, replaces)
        compiling.number = str(given["compile_id"])
        compiling.is_whole = bool(given.get("one_graph"))
        compiling.breaks = len(torch._dynamo.utils.graph_break_reasons)
        compiling.varies = bool(torch._dynamo.config.automatic_dynamic_shapes)
        self._thread.compiling.append(compiling)
        return compiling

    def _describe(
        self, trace: Trace, modes: list[str], entry: FrameType | None, *, is_new: bool
    ) -> None:
        """Fills in the mode of a trace and the Keras function it belongs to."""
        code = None if entry is None else code_of(python_function(entry.f_locals.get("fn")))
        own = code is not None and is_keras_code(code)
        step = self._keras.step(code, entry) if own and entry is not None else None
        if code is not None and step is not None:
            if trace.defined[:2] != defined(code)[:2]:
                modes.append(f"in {trace.function}")
            else:
                trace.causes = step.causes(new=is_new)
            step.describe(trace)
            modes.insert(0, trace.mode)
        trace.mode = ", ".join(filter(None, modes))

    def _end(self, compiling: _Compiling, result: Any) -> None:
        if compiling in self._thread.compiling:
            del self._thread.compiling[self._thread.compiling.index(compiling) :]
        scope, compiling.scope = compiling.scope, None
        utils, trace = sys.modules["torch._dynamo.utils"], compiling.program.trace
        for each in utils.graph_break_reasons[compiling.breaks :]:
            self._breaks.note(each.reason, each.user_stack, trace)
        error = sys.exception() if result is None else None
        if error is not None:
            self._failed(compiling, error)
        is_program = getattr(result, "guarded_code", result) is not None
        if scope is None or not (is_program or trace.failed):
            self._watcher.drop(compiling.opened)  # nothing was compiled: the frame has no tensors
            return
        metrics = metrics_of(utils, compiling.number)
        measure(trace, metrics, time.perf_counter() - compiling.began)
        failed = reasons(compiling.failed_guards or _recorded_reason(metrics))
        causes, reason = self._history.causes(compiling.program, failed, scope, compiling.replaces)
        if not trace.causes or (causes and causes[0].kind in _FIRST):
            trace.causes = causes
        varies = "" if reason is None or not compiling.varies else becomes_dynamic(reason, scope)
        if varies:
            note = f"from here on, PyTorch treats {varies} as dynamic"
            trace.note = f"{trace.note}; {note}" if trace.note else note
        if getattr(metrics, "graph_op_count", None) == 0 and trace.group.startswith("torch:"):
            is_users = user_code.is_users_file(compiling.code)
            trace.what = "trace" if is_users else "small"
        self._watcher.end(compiling.opened)
        self._history.add(compiling.number, compiling.program)
        code = getattr(getattr(result, "guarded_code", result), "code", None)
        again = functools.partial(self._watcher.log.again, trace)
        time_first_run(trace, code, scope.module_globals, again)

    def _failed(self, compiling: _Compiling, error: BaseException) -> None:
        """Records an error; PyTorch hides some and then runs the function uncompiled."""
        kind, trace = getattr(error, "gb_type", None), compiling.program.trace
        if compiling.given_up or kind == _OWN_ERROR:
            return
        trace.failed = type(error).__name__
        if kind is not None and not compiling.is_whole:
            stack = getattr(error, "real_stack", ())
            self._breaks.note(str(getattr(error, "msg", error)), stack, trace, whole=True)

    def _give_up(self, config: Any, kind: str) -> None:
        compiling = self._thread.compiling[-1]
        compiling.given_up = True
        trace, failed = compiling.program.trace, reasons(compiling.failed_guards)
        last = cause(failed[0], compiling.scope) if failed and compiling.scope is not None else None
        limit = f"`torch._dynamo.config.{kind}` = {getattr(config, kind)}"
        self._watcher.log.note(
            Incident(
                kind="recompile-limit",
                engine="torch",
                function=trace.function,
                site=trace.called,
                what=f"`{trace.function}` has reached {limit} and is no longer compiled",
                value="" if last is None else f"last cause: {last.text}",
            )
        )

    # Backward programs ----------------------------------------------------------------------

    def _backward_began(self, args: Any = None) -> None:
        if _is_backward(args):
            self._thread.backward[str(args.compile_id)] = time.perf_counter()

    def _backward_ended(self, args: Any = None) -> None:
        began = self._thread.backward.pop(str(getattr(args, "compile_id", "")), None)
        program = None if began is None else self._history.program(str(args.compile_id))
        if began is not None and program is not None:
            seconds = program.trace.seconds
            took = seconds.get("compile", 0.0) + time.perf_counter() - began
            seconds["compile"] = round(took, 6)
            self._watcher.log.again(program.trace)


def _is_backward(args: Any) -> bool:
    trigger = getattr(args, "callback_trigger", None)
    return getattr(trigger, "name", "") == "LAZY_BACKWARD"


def _recorded_reason(metrics: Any) -> list[str]:
    """The one reason in PyTorch's metrics, for versions without the hook on reasons."""
    reason = getattr(metrics, "recompile_reason", None)
    return [reason] if reason else []
