"""What the layers of a model give while it is called: to be looked at, or changed."""

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
    """Calls `hook(layer, output)` after every layer, in this thread; what it returns is used.

    Layers of a functional model find `__call__` on their class, so that is where it is led
    through here, while the block lasts.
    """
    original = keras.layers.Layer.__call__

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        inner: Callable[[Any, Any], Any] | None = getattr(_thread, "hook", None)
        return output if inner is None else inner(self, output)

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
        wanted: The names of the layers, or None for all.
    """

    def __init__(self, model: Any, wanted: set[str] | None) -> None:
        self._layers = {
            id(layer) for layer in model._flatten_layers(include_self=False) if not _is_cell(layer)
        }
        self._wanted = wanted
        self._place = _engines.current().current_graph
        self._home = self._place()
        self.calls: list[tuple[Any, Any]] = []

    def belongs(self, layer: Any) -> bool:
        """Whether this call of a layer is one of the model's, and not inside a loop or branch."""
        return id(layer) in self._layers and self._place() is self._home

    def __call__(self, layer: Any, output: Any) -> Any:
        if self.belongs(layer) and (self._wanted is None or layer.name in self._wanted):
            self.calls.append((layer, output))
        return output

    def by_name(self) -> dict[str, Any]:
        """Outputs by layer; a list of them for a layer that was called several times."""
        found: dict[str, list[Any]] = {}
        for layer, output in self.calls:
            found.setdefault(layer.name, []).append(output)
        return {name: each[0] if len(each) == 1 else each for name, each in found.items()}


def _is_cell(layer: Any) -> bool:
    """Whether a layer is a cell, which runs inside the loop of a recurrent layer."""
    return hasattr(layer, "state_size") and not isinstance(layer, keras.layers.RNN)
