"""Calls Keras callbacks where Keras calls them; batch hooks only if a callback overrides them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
from keras import tree

Hook = Callable[..., Any]


_STOP_FLAGS = {"train": "stop_training", "test": "stop_evaluating", "predict": "stop_predicting"}


class StopFlag(NamedTuple):
    """A model attribute, such as `stop_training`, that a callback sets to end a loop.

    Attributes:
        attributes: The attributes of the model, by name.
        name: The name of the flag.
    """

    attributes: Mapping[str, Any]
    name: str

    @classmethod
    def of(cls, model: Any, kind: str) -> StopFlag:
        """Returns the flag that ends a loop of a kind: train, test or predict."""
        return cls(vars(model), _STOP_FLAGS[kind])

    def is_set(self) -> bool:
        """Whether the loop is to end."""
        return bool(self.attributes.get(self.name))


class Callbacks:
    """The callbacks of one `fit`, `evaluate` or `predict`."""

    def __init__(self, callbacks: Any, model: Any, *, history: bool, **params: Any) -> None:
        given = getattr(callbacks, "callbacks", callbacks)  # unpacks a Keras `CallbackList`
        self._all: list[Any] = list(tree.flatten(given)) if given else []
        if history and not any(isinstance(c, keras.callbacks.History) for c in self._all):
            self._all.append(keras.callbacks.History())
        for callback in self._all:
            if isinstance(callback, keras.callbacks.History):
                model.history = callback
            callback.set_model(model)
            callback.set_params(params)
        # Collected once: the lists cannot change during a run, and with empty ones the loop takes
        # the path without hooks.
        self._hooks = {
            (kind, when): self._overridden_hooks(kind, when)
            for kind in ("train", "test", "predict")
            for when in ("begin", "end")
        }

    def _overridden_hooks(self, kind: str, when: str) -> list[Hook]:
        # By default `on_train_batch_*` calls the older `on_batch_*`: either may be overridden.
        name = f"on_{kind}_batch_{when}"
        return [
            getattr(callback, name)
            for callback in self._all
            if not _is_default(callback, name)
            or (kind == "train" and not _is_default(callback, f"on_batch_{when}"))
        ]

    def listens(self, kind: str) -> bool:
        """Whether any callback overrides a batch hook of this kind."""
        return bool(self._hooks[kind, "begin"] or self._hooks[kind, "end"])

    def batch_begin(self, kind: str, step: int) -> None:
        """Calls the hooks for the begin of a batch."""
        for hook in self._hooks[kind, "begin"]:
            hook(step, logs={})

    def batch_end(self, kind: str, step: int, logs: dict[str, Any]) -> None:
        """Calls the hooks for the end of a batch."""
        for hook in self._hooks[kind, "end"]:
            hook(step, logs=logs)

    def notify(self, event: str, *args: Any) -> None:
        """Calls `on_<event>` of every callback."""
        for callback in self._all:
            getattr(callback, f"on_{event}")(*args)


def _is_default(callback: Any, name: str) -> bool:
    return bool(getattr(getattr(callback, name), "_is_default", False))
