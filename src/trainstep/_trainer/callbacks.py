"""Keras callbacks, called where Keras calls them; batch hooks only if somebody listens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import tree

Hook = Callable[..., Any]


class Callbacks:
    """The callbacks of one run."""

    def __init__(self, callbacks: Any, model: Any, *, history: bool, **params: Any) -> None:
        given = getattr(callbacks, "callbacks", callbacks)  # a Keras `CallbackList`
        self._all: list[Any] = list(tree.flatten(given)) if given else []
        if history and not any(isinstance(c, keras.callbacks.History) for c in self._all):
            self._all.append(keras.callbacks.History())
        for callback in self._all:
            if isinstance(callback, keras.callbacks.History):
                model.history = callback
            callback.set_model(model)
            callback.set_params(params)
        # During the run the lists do not change; an empty one costs a loop nothing.
        self._hooks = {
            (kind, when): self._listening(kind, when)
            for kind in ("train", "test", "predict")
            for when in ("begin", "end")
        }

    def _listening(self, kind: str, when: str) -> list[Hook]:
        name = f"on_{kind}_batch_{when}"
        return [
            getattr(callback, name)
            for callback in self._all
            if not _is_default(callback, name)
            or (kind == "train" and not _is_default(callback, f"on_batch_{when}"))
        ]

    def listens(self, kind: str) -> bool:
        """Whether anybody wants to hear of batches."""
        return bool(self._hooks[kind, "begin"] or self._hooks[kind, "end"])

    def batch_begin(self, kind: str, step: int) -> None:
        """Tells those who listen that a batch begins."""
        for hook in self._hooks[kind, "begin"]:
            hook(step, logs={})

    def batch_end(self, kind: str, step: int, logs: dict[str, Any]) -> None:
        """Tells those who listen that a batch ended."""
        for hook in self._hooks[kind, "end"]:
            hook(step, logs=logs)

    def tell(self, event: str, *args: Any) -> None:
        """Calls `on_<event>` of every callback."""
        for callback in self._all:
            getattr(callback, f"on_{event}")(*args)


def _is_default(callback: Any, name: str) -> bool:
    return bool(getattr(getattr(callback, name), "_is_default", False))
