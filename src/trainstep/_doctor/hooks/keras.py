"""Keras: which of its methods the user called, for which model, and what it makes of a model."""

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
from trainstep._doctor.hooks.call_sites import keras_call, site
from trainstep._doctor.hooks.eager_gradients import Eager
from trainstep._doctor.hooks.watcher import Watcher
from trainstep._doctor.records import Cause, Happened, Site, Span, Trace
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
_SPANS = 2000  # calls of `train_on_batch` and the like that are noted
_STEPS = ("train_step", "test_step", "predict_step")
_WORDS = [
    (re.compile(r"\bdata\[0\]"), "x"),
    (re.compile(r"\bdata\[1\]"), "y"),
    (re.compile(r"\bdata\[2\]"), "sample_weight"),
    (re.compile(r"\bdata(?=:)"), "the batch"),
    (re.compile(r"\bstate(?=\[)"), "variables"),
]
Flags = dict[str, bool]


class Compiled:
    """What is known of a model since its last `compile()`."""

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self.flags: Flags = {}  # at `compile()`, or at the last trace
        self.flags_of: dict[str, Flags] = {}  # at the last trace, by role
        self.looked: int | None = None  # how often flags had been set when they were looked at
        self.told: set[str] = set()
        self.traced: dict[str, int] = {}  # how often it was compiled before its last trace, by role


class Keras:
    """Watches Keras."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._compiled: dict[int, Compiled] = {}
        self.eager = Eager(watcher)
        self._set = 0  # how often `trainable` of a layer was set
        self._spans = 0

    def install(self, patches: Patches) -> None:
        """Hooks Keras when it is imported."""
        patches.on_import("keras.src.trainers.trainer", functools.partial(self._compile, patches))
        patches.on_import("keras.src.layers.layer", functools.partial(self._flags, patches))
        for engine, name in _TRAINERS.items():
            module = f"keras.src.backend.{engine}.trainer"
            patches.on_import(module, functools.partial(self._methods, patches, engine, name))

    def _compile(self, patches: Patches, module: Any) -> None:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def compile(model: Any, *args: Any, **kwargs: Any) -> Any:
                result = original(model, *args, **kwargs)
                frame = sys._getframe(1)
                self._watcher.guarded(lambda: self._note_compile(model, frame))
                return result

            return compile

        patches.replace(module.Trainer, "compile", make)

    def _flags(self, patches: Patches, module: Any) -> None:
        """`trainable` of layers: to look at all of them at every call would take long."""

        def make(original: Any) -> Any:
            @functools.wraps(original.fset)
            def trainable(layer: Any, value: Any) -> None:
                self._set += 1
                original.fset(layer, value)

            return original.setter(trainable)

        patches.replace(module.Layer, "trainable", make)

    def _note_compile(self, model: Any, frame: FrameType) -> None:
        found = self._of(model)
        found.sites.append(site(frame))
        found.flags = flags(model)
        found.told.clear()

    def _of(self, model: Any) -> Compiled:
        return self._compiled.setdefault(self._watcher.serial(model, "model"), Compiled())

    def _methods(self, patches: Patches, engine: str, name: str, module: Any) -> None:
        for method in _METHODS:
            make = functools.partial(self._spanning, engine, method)
            patches.replace(getattr(module, name), method, make)

    def _spanning(self, engine: str, method: str, original: Any) -> Any:
        @functools.wraps(original)
        def spanning(model: Any, *args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            began = self._watcher.log.elapsed()
            self._watcher.guarded(lambda: self._enter(engine, method, model, frame))
            try:
                return original(model, *args, **kwargs)
            finally:
                self._watcher.guarded(lambda: self._leave(engine, method, model, frame, began))

        return spanning

    def _enter(self, engine: str, method: str, model: Any, frame: FrameType) -> None:
        if self._watcher.open_traces():
            self._cold_metrics(engine, method, model, frame)
        elif not call_sites.is_keras(frame):
            self._look(engine, method, model, frame)

    def _leave(self, engine: str, method: str, model: Any, frame: FrameType, began: float) -> None:
        if self._watcher.open_traces() or call_sites.is_keras(frame):
            return
        if method.endswith("_on_batch"):  # whose next call will look
            self._spans += 1
            if self._spans > _SPANS:
                return
        else:
            self._look(engine, method, model, frame)
        seconds = self._watcher.log.elapsed() - began
        span = Span(at=round(began, 4), what=method, seconds=round(seconds, 6), site=site(frame))
        self._watcher.log.note(span)

    def _look(self, engine: str, method: str, model: Any, frame: FrameType) -> None:
        """What has changed since a model was compiled or traced."""
        if engine == "jax":  # TensorFlow's functions are looked at when they are called
            roles = ("train", "test") if method == "fit" else (call_sites.ROLES[method],)
            serial = self._watcher.serial(model, "model")
            for role in roles:
                self._watcher.check_group(f"keras:{serial}:{role}", lambda: site(frame))
        if call_sites.ROLES[method] == "train":
            self._frozen(engine, model, frame)

    def _frozen(self, engine: str, model: Any, frame: FrameType) -> None:
        """Layers whose flag came too late: after the trace, or so that nothing is trained."""
        found = self._of(model)
        if found.looked == self._set:
            return
        found.looked = self._set
        in_time = engine == "torch" or "train" not in found.traced
        if not found.sites or (in_time and model.trainable_variables):
            return
        now = flags(model)
        late = {path: flag for path, flag in found.flags.items() if now.get(path, flag) != flag}
        if not late or found.told == set(late):
            return
        found.told = set(late)
        line = user_code.name(*found.sites[-1][:2])
        layers = ", ".join(f"{path!r}: {flag} -> {not flag}" for path, flag in late.items())
        self._watcher.log.note(
            Happened(
                kind="frozen",
                engine=engine,
                group=f"keras:{self._watcher.serial(model, 'model')}:train",
                function=title("train", model),
                site=site(frame),
                what=f"`trainable` of layers has changed since `compile()` at {line}: {layers}",
                value="nothing of the model is trained" if in_time else "",
                before=str(next(iter(late.values()))),
                now=str(not next(iter(late.values()))),
                noticed=site(frame),
            )
        )

    def _cold_metrics(self, engine: str, method: str, model: Any, frame: FrameType) -> None:
        """Metrics that are made inside a trace, after `train_on_batch` has reset all there were."""
        metrics = getattr(model, "_compile_metrics", None)
        if not method.endswith("_on_batch") or metrics is None or metrics.built:
            return
        trace = self._watcher.open_traces()[0].trace
        self._watcher.log.note(
            Happened(
                kind="metrics",
                engine=engine,
                group=trace.group,
                function=trace.function,
                site=site(frame),
                what=f"`{method}` of model {model.name!r} was traced before its metrics were built",
            )
        )

    def step(self, code: CodeType | None, frame: FrameType, fn: Any = None) -> Step | None:
        """What a trace is to Keras, if it is one of a function that Keras made for a model.

        That is Keras's own code, or a step that the user wrote as a method of the model.
        """
        called = keras_call(frame)
        if called is None or code is None:
            return None
        own = code.co_name in _STEPS and getattr(fn, "__self__", None) is called.model
        if not own and not is_keras_code(code):
            return None
        return Step(self, called, self._watcher.serial(called.model, "model"))

    def causes(self, model: Any, role: str, *, new: bool) -> list[Cause]:
        """Why a function of a model is traced, if it is because Keras made it again."""
        found = self._of(model)
        before, now = found.traced.get(role), len(found.sites)
        found.traced[role] = now
        flags_now, flags_before = flags(model), found.flags_of.get(role)
        found.flags_of[role] = flags_now
        if role == "train":
            found.flags = flags_now  # which the program has now
        if before is None:
            return self._new_model(found, role)
        if now > max(before, 1):
            line = user_code.name(*found.sites[-1][:2])
            if flags_now != flags_before:
                text = f"`compile()` was called at {line}, after `trainable` had changed"
                return [Cause("mode", text)]
            return [Cause("compile", f"`compile()` was called again at {line}")]
        made = Cause("function", f"Keras was made to make its {role} function again")
        return [made] if new else []

    def _new_model(self, found: Compiled, role: str) -> list[Cause]:
        """Says so if models of the same line were traced before."""
        if not found.sites:
            return []
        place = found.sites[-1][:2]
        known = [each for each in self._compiled.values() if role in each.traced]
        number = sum(bool(each.sites) and each.sites[-1][:2] == place for each in known)
        if number < 2:
            return []
        text = f"a new model, number {number} of those compiled at {user_code.name(*place)}"
        return [Cause("mode", text)]


class Step:
    """A function that Keras made for a model. Lives while it is traced."""

    def __init__(self, keras: Keras, called: call_sites.Keras, serial: int) -> None:
        self._keras, self._called, self._serial = keras, called, serial

    def describe(self, trace: Trace) -> None:
        """Says in a trace what it is of."""
        trace.function = title(self._called.role, self._called.model)
        trace.group = f"keras:{self._serial}:{self._called.role}"
        trace.via, trace.mode = self._called.via, self._called.role

    def causes(self, *, new: bool) -> list[Cause]:
        """Why it is traced, if it is because Keras made it again; `new`: a new function object."""
        return self._keras.causes(self._called.model, self._called.role, new=new)

    def parts(self) -> list[Part]:
        """Which layers are trained, for a signature."""
        if self._called.role != "train":
            return []
        found = flags(self._called.model).items()
        return [Part(f"trainable of layer {p!r}", str(f), "flag", f) for p, f in found]

    @property
    def uses(self) -> Callable[[], Sequence[Any]]:
        """What finds the objects whose code Keras runs in it."""
        return functools.partial(_uses, self._called.model)


def in_words(text: str) -> str:
    """A text about what Keras hands its functions, in the words of the user's call."""
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


def title(role: str, model: Any) -> str:
    """What the function of a model is called."""
    return f"{role} function of model {getattr(model, 'name', type(model).__name__)!r}"


def flags(model: Any) -> Flags:
    """Which layers of a model are trained."""
    layers = [each for each in model._flatten_layers() if not each._layers]
    named = [each for each in layers if type(each).__name__ != "InputLayer"]
    return {layer.path or layer.name: layer.trainable for layer in named}


def is_keras_code(code: CodeType) -> bool:
    """Whether a function is one that Keras makes for a model."""
    file = code.co_filename.replace("\\", "/")
    return "/keras/" in file and file.endswith("trainer.py")
