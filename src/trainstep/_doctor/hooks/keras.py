"""Keras: records its methods, `compile()` calls, `trainable` flags and the functions it builds."""

from __future__ import annotations

import functools
import re
import sys
import types
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

from trainstep._common import user_code
from trainstep._common.import_hooks import Patches
from trainstep._doctor.hooks import call_sites
from trainstep._doctor.hooks.call_sites import current_keras_call, site
from trainstep._doctor.hooks.eager_gradients import EagerGradients
from trainstep._doctor.hooks.watcher import Watcher
from trainstep._doctor.records import Cause, Incident, Site, Span, Trace
from trainstep._explain.signature import Part

_TRAINERS = {
    "jax": "JAXTrainer",
    "tensorflow": "TensorFlowTrainer",
    "torch": "TorchTrainer",
}
_METHODS = (
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
)
_SPANS = 2000  # recorded calls of `train_on_batch` and the like
_STEPS = ("train_step", "test_step", "predict_step")
_WORDS = [
    (re.compile(r"\bdata\[0\]"), "x"),
    (re.compile(r"\bdata\[1\]"), "y"),
    (re.compile(r"\bdata\[2\]"), "sample_weight"),
    (re.compile(r"\bdata(?=:)"), "the batch"),
    (re.compile(r"\bstate(?=\[)"), "variables"),
]
Flags = dict[str, bool]


class CompiledModel:
    """The state of a model since its last `compile()`."""

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self.trainable_flags: Flags = {}  # at `compile()`, or at the last trace
        self.flags_of: dict[str, Flags] = {}  # at the last trace, by role
        self.flags_checked_at: int | None = None  # the count of assignments then
        self.reported: set[str] = set()
        self.traced: dict[str, int] = {}  # `compile()` calls before the last trace, by role


class Keras:
    """Hooks Keras."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._compiled: dict[int, CompiledModel] = {}
        self.eager = EagerGradients(watcher)
        self._trainable_assignments = 0  # to `trainable` of any layer
        self._spans = 0

    def install(self, patches: Patches) -> None:
        """Installs the hooks when Keras is imported."""
        patches.on_import(
            "keras.src.trainers.trainer", functools.partial(self._hook_compile, patches)
        )
        patches.on_import(
            "keras.src.layers.layer", functools.partial(self._hook_trainable, patches)
        )
        for engine, name in _TRAINERS.items():
            module = f"keras.src.backend.{engine}.trainer"
            patches.on_import(module, functools.partial(self._hook_methods, patches, engine, name))

    def _hook_compile(self, patches: Patches, module: Any) -> None:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def compile(model: Any, *args: Any, **kwargs: Any) -> Any:
                result = original(model, *args, **kwargs)
                frame = sys._getframe(1)
                self._watcher.guarded(lambda: self._note_compile(model, frame))
                return result

            return compile

        patches.replace(module.Trainer, "compile", make)

    def _hook_trainable(self, patches: Patches, module: Any) -> None:
        """Counts assignments to `trainable`: comparing all layers at every call would be slow."""

        def make(original: Any) -> Any:
            @functools.wraps(original.fset)
            def trainable(layer: Any, value: Any) -> None:
                self._trainable_assignments += 1
                original.fset(layer, value)

            return original.setter(trainable)

        patches.replace(module.Layer, "trainable", make)

    def _note_compile(self, model: Any, frame: FrameType) -> None:
        found = self._of(model)
        found.sites.append(site(frame))
        found.trainable_flags = trainable_flags(model)
        found.reported.clear()

    def _of(self, model: Any) -> CompiledModel:
        return self._compiled.setdefault(
            self._watcher.serial_number(model, "model"), CompiledModel()
        )

    def _hook_methods(self, patches: Patches, engine: str, name: str, module: Any) -> None:
        for method in _METHODS:
            make = functools.partial(self._timed_method, engine, method)
            patches.replace(getattr(module, name), method, make)

    def _timed_method(self, engine: str, method: str, original: Any) -> Any:
        @functools.wraps(original)
        def timed(model: Any, *args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            began = self._watcher.log.elapsed()
            self._watcher.guarded(lambda: self._enter(engine, method, model, frame))
            try:
                return original(model, *args, **kwargs)
            finally:
                self._watcher.guarded(lambda: self._leave(engine, method, model, frame, began))

        return timed

    def _enter(self, engine: str, method: str, model: Any, frame: FrameType) -> None:
        if self._watcher.open_traces():
            self._note_unbuilt_metrics(engine, method, model, frame)
        elif not call_sites.is_keras(frame):
            self._check_model(engine, method, model, frame)

    def _leave(self, engine: str, method: str, model: Any, frame: FrameType, began: float) -> None:
        if self._watcher.open_traces() or call_sites.is_keras(frame):
            return
        if method.endswith("_on_batch"):  # the next call checks the model
            self._spans += 1
            if self._spans > _SPANS:
                return
        else:
            self._check_model(engine, method, model, frame)
        seconds = self._watcher.log.elapsed() - began
        span = Span(at=round(began, 4), what=method, seconds=round(seconds, 6), site=site(frame))
        self._watcher.log.note(span)

    def _check_model(self, engine: str, method: str, model: Any, frame: FrameType) -> None:
        """Checks for values and flags that changed since a model was compiled or traced."""
        if engine == "jax":  # on TensorFlow, each function call checks
            roles = ("train", "test") if method == "fit" else (call_sites.ROLES[method],)
            serial_number = self._watcher.serial_number(model, "model")
            for role in roles:
                self._watcher.check_group(f"keras:{serial_number}:{role}", lambda: site(frame))
        if call_sites.ROLES[method] == "train":
            self._note_late_flags(engine, model, frame)

    def _note_late_flags(self, engine: str, model: Any, frame: FrameType) -> None:
        """Records `trainable` flags set after the trace, or that leave nothing to train."""
        found = self._of(model)
        if found.flags_checked_at == self._trainable_assignments:
            return
        found.flags_checked_at = self._trainable_assignments
        in_time = engine == "torch" or "train" not in found.traced
        if not found.sites or (in_time and model.trainable_variables):
            return
        now = trainable_flags(model)
        late = {
            path: flag
            for path, flag in found.trainable_flags.items()
            if now.get(path, flag) != flag
        }
        if not late or found.reported == set(late):
            return
        found.reported = set(late)
        line = user_code.name(*found.sites[-1][:2])
        layers = ", ".join(f"{path!r}: {flag} -> {not flag}" for path, flag in late.items())
        self._watcher.log.note(
            Incident(
                kind="frozen",
                engine=engine,
                group=f"keras:{self._watcher.serial_number(model, 'model')}:train",
                function=function_name("train", model),
                site=site(frame),
                what=f"`trainable` of layers has changed since `compile()` at {line}: {layers}",
                value="no variable of the model is trained" if in_time else "",
                before=str(next(iter(late.values()))),
                now=str(not next(iter(late.values()))),
                noticed=site(frame),
            )
        )

    def _note_unbuilt_metrics(self, engine: str, method: str, model: Any, frame: FrameType) -> None:
        """Records metrics that are built in a trace, after `train_on_batch` reset the others."""
        metrics = getattr(model, "_compile_metrics", None)
        if not method.endswith("_on_batch") or metrics is None or metrics.built:
            return
        trace = self._watcher.open_traces()[0].trace
        self._watcher.log.note(
            Incident(
                kind="metrics",
                engine=engine,
                group=trace.group,
                function=trace.function,
                site=site(frame),
                what=f"`{method}` of model {model.name!r} was traced before its metrics were built",
            )
        )

    def step(self, code: CodeType | None, frame: FrameType, fn: Any = None) -> KerasFunction | None:
        """The Keras function that a trace belongs to, if any.

        It consists of Keras's own code, or of a step that the user wrote as a method of the model.
        """
        called = current_keras_call(frame)
        if called is None or code is None:
            return None
        own = code.co_name in _STEPS and getattr(fn, "__self__", None) is called.model
        if not own and not is_keras_code(code):
            return None
        return KerasFunction(self, called, self._watcher.serial_number(called.model, "model"))

    def causes(self, model: Any, role: str, *, new: bool) -> list[Cause]:
        """The causes of a trace, if Keras rebuilt the function of a model."""
        found = self._of(model)
        before, now = found.traced.get(role), len(found.sites)
        found.traced[role] = now
        flags_now, flags_before = trainable_flags(model), found.flags_of.get(role)
        found.flags_of[role] = flags_now
        if role == "train":
            found.trainable_flags = flags_now  # those of the new program
        if before is None:
            return self._new_model(found, role)
        if now > max(before, 1):
            line = user_code.name(*found.sites[-1][:2])
            if flags_now != flags_before:
                text = f"`compile()` was called at {line}, after `trainable` had changed"
                return [Cause("mode", text)]
            return [Cause("compile", f"`compile()` was called again at {line}")]
        made = Cause("function", f"Keras rebuilt its {role} function")
        return [made] if new else []

    def _new_model(self, found: CompiledModel, role: str) -> list[Cause]:
        """The cause for a further model compiled at the same line."""
        if not found.sites:
            return []
        place = found.sites[-1][:2]
        known = [each for each in self._compiled.values() if role in each.traced]
        number = sum(bool(each.sites) and each.sites[-1][:2] == place for each in known)
        if number < 2:
            return []
        text = f"new model, number {number} compiled at {user_code.name(*place)}"
        return [Cause("mode", text)]


class KerasFunction:
    """A function that Keras made for a model. Lives only during its trace."""

    def __init__(self, keras: Keras, called: call_sites.KerasCall, serial_number: int) -> None:
        self._keras, self._called, self._serial = keras, called, serial_number

    def describe(self, trace: Trace) -> None:
        """Fills in the function, group, method and mode of a trace."""
        trace.function = function_name(self._called.role, self._called.model)
        trace.group = f"keras:{self._serial}:{self._called.role}"
        trace.via, trace.mode = self._called.via, self._called.role

    def causes(self, *, new: bool) -> list[Cause]:
        """The causes, if Keras rebuilt the function; `new`: whether its object is new."""
        return self._keras.causes(self._called.model, self._called.role, new=new)

    def parts(self) -> list[Part]:
        """The `trainable` flags, as parts of a signature."""
        if self._called.role != "train":
            return []
        found = trainable_flags(self._called.model).items()
        return [Part(f"trainable of layer {p!r}", str(f), "flag", f) for p, f in found]

    @property
    def uses(self) -> Callable[[], Sequence[Any]]:
        """A function that returns the objects whose code Keras runs inside."""
        return functools.partial(_uses, self._called.model)


def in_user_terms(text: str) -> str:
    """A text with Keras's internal names (`data[0]`) replaced by the user's (`x`)."""
    for pattern, word in _WORDS:
        text = pattern.sub(word, text)
    return text


def _uses(model: Any) -> list[Any]:
    found = [model, getattr(model, "optimizer", None)]
    for name in _STEPS:
        own = getattr(type(model), name, None)
        if isinstance(own, types.FunctionType) and user_code.is_users_file(own.__code__):
            found.append(types.MethodType(own, model))
    metrics = getattr(getattr(model, "_compile_metrics", None), "_user_metrics", None)
    for given in (getattr(model, "loss", None), metrics):
        found += _objects(given)
    return [each for each in found if each is not None]


def _objects(given: Any) -> list[Any]:
    if isinstance(given, dict):
        return [each for value in given.values() for each in _objects(value)]
    if isinstance(given, (list, tuple)):
        return [each for value in given for each in _objects(value)]
    return [] if given is None or isinstance(given, str) else [given]


def function_name(role: str, model: Any) -> str:
    """The display name of a function of a model."""
    return f"{role} function of model {getattr(model, 'name', type(model).__name__)!r}"


def trainable_flags(model: Any) -> Flags:
    """The `trainable` flag of each layer of a model."""
    layers = [each for each in model._flatten_layers() if not each._layers]
    named = [each for each in layers if type(each).__name__ != "InputLayer"]
    return {layer.path or layer.name: layer.trainable for layer in named}


def is_keras_code(code: CodeType) -> bool:
    """Whether the code is that of a function that Keras makes for a model."""
    file = code.co_filename.replace("\\", "/")
    return "/keras/" in file and file.endswith("trainer.py")
