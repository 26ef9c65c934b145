"""Hooks that observe or change the outputs of layers while a model is called."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras

from trainstep import _engines

_thread = threading.local()


@contextlib.contextmanager
def layer_outputs(hook: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Replaces the output of every layer by `hook(layer, output)`, in this thread only.

    Python looks `__call__` up on the class, not on the object, so the block temporarily replaces
    `Layer.__call__` itself.
    """
    original = keras.layers.Layer.__call__

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        # Other threads pass through here too, and have no hook.
        current: Callable[[Any, Any], Any] | None = getattr(_thread, "hook", None)
        return output if current is None else current(self, output)

    before, _thread.hook = getattr(_thread, "hook", None), hook
    keras.layers.Layer.__call__ = __call__
    try:
        yield
    finally:
        keras.layers.Layer.__call__ = original
        _thread.hook = before


class Activations:
    """The outputs of the layers of a model, in the order of their calls.

    Args:
        model: The model.
        names: The names of the layers, or None for all.
    """

    def __init__(self, model: Any, names: set[str] | None) -> None:
        self._layers = {
            id(layer) for layer in model._flatten_layers(include_self=False) if not _is_cell(layer)
        }
        self._names = names
        self._current_graph = _engines.current().current_graph
        self._model_graph = self._current_graph()
        self.calls: list[tuple[Any, Any]] = []

    def is_model_call(self, layer: Any) -> bool:
        """Whether a layer of the model was called outside any loop or branch.

        A tensor made inside a loop or branch cannot leave its graph.
        """
        return id(layer) in self._layers and self._current_graph() is self._model_graph

    def __call__(self, layer: Any, output: Any) -> Any:
        if self.is_model_call(layer) and (self._names is None or layer.name in self._names):
            self.calls.append((layer, output))
        return output

    def by_name(self) -> dict[str, Any]:
        """Returns outputs by layer; a list for a layer that was called several times."""
        found: dict[str, list[Any]] = {}
        for layer, output in self.calls:
            found.setdefault(layer.name, []).append(output)
        return {name: each[0] if len(each) == 1 else each for name, each in found.items()}


def _is_cell(layer: Any) -> bool:
    """Whether a layer is a cell, which runs inside the loop of a recurrent layer."""
    return hasattr(layer, "state_size") and not isinstance(layer, keras.layers.RNN)
