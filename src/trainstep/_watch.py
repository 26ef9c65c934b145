"""What a program was compiled for besides its arguments: flags, and the values around the step.

Setting `layer.trainable` or `layer.dtype_policy` between calls changes what a step would do, so
every hit compares them; and so it does a number that the step took from around it. Layers are held
weakly: a program must not keep a model alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter, call
from typing import Any

from trainstep._captures import Captures
from trainstep._seeds import adopt, other_generator
from trainstep._signature import Part, distinct
from trainstep._source import Source, define

Stale = Callable[[list[tuple[str, str, str]]], None]
_layer_flags = attrgetter("_trainable", "_dtype_policy")
_variable_flag = attrgetter("_trainable")


class Watch:
    """Layers and variables whose flags matter, and the flags that were seen.

    Args:
        models: The models and layers that the step called.
        reads: The variables that it read.
        writes: Those that it wrote.
        captures: The values that it took from around it.
        stale: Called with what has changed of those: raises, or lets the program serve on. None:
            the program does not serve any more.

    Attributes:
        source: The expression of the flags as they are now; those seen are its `seen_flags`.
        around: An expression that is true if something around the step has changed, or may have;
            `cells` in it is the closure of the function. Empty if there is nothing to look at.
    """

    def __init__(
        self,
        models: Iterable[Any],
        reads: Sequence[Any],
        writes: Sequence[Any],
        captures: Captures,
        stale: Stale | None,
    ) -> None:
        self._captures, self._stale = captures, stale
        self._other = other_generator(reads)
        pieces = [piece for piece in (captures.source, self._other) if piece.text]
        self.around = Source(
            " or ".join(piece.text for piece in pieces),
            {name: value for piece in pieces for name, value in piece.names.items()},
        )
        layers: dict[int, Any] = {}
        for model in models:
            for layer in model._flatten_layers():
                if not _inert(layer):
                    layers[id(layer)] = layer
        owned: dict[int, Any] = {}
        for layer in layers.values():
            owned.update((id(v), v) for v in layer._trainable_variables)
        # A variable of no layer: frozen and yet written, it is a slot or a metric's, with no flag
        # that matters.
        written = {id(v) for v in writes}
        own = {
            id(v): v for v in reads if id(v) not in owned and (v.trainable or id(v) not in written)
        }
        self._layers = [weakref.ref(layer) for layer in layers.values()]
        self._names = distinct(layer.name for layer in layers.values())
        self._variables = [*owned.values(), *own.values()]
        names = {
            "layers": self._layers,
            "layer_flags": _layer_flags,
            "live": call,
            "watched": self._variables,
            "variable_flag": _variable_flag,
        }
        text = "[*map(layer_flags, map(live, layers)), *map(variable_flag, watched)]"
        self._look = define("look()", f"return {text}", names)
        self._seen = self._look()
        self.source = Source(text, names | {"seen_flags": self._seen})

    def holds(self, cells: Any) -> bool:
        """Whether all is as it was at the trace; `cells` is the closure of the function."""
        try:
            if self._look() != self._seen:
                return False
        except AttributeError:  # a layer is gone, and a call that still needs it cannot come here
            return False
        if not self._captures.holds(cells):
            if self._stale is None:
                return False
            self._stale(list(self._captures.changes(cells)))
            self._captures.accept(cells)
        if self._other.text:
            adopt()
        return True

    def parts(self, cells: Any) -> Iterator[Part]:
        """All of it as it is now, for a signature."""
        yield from self._flags()
        yield from self._captures.parts(cells)

    def _flags(self) -> Iterator[Part]:
        owners: dict[int, bool] = {}
        for ref, name in zip(self._layers, self._names, strict=True):
            layer = ref()
            if layer is not None:
                trainable, policy = layer._trainable, layer._dtype_policy.name
                yield Part(f"layer {name!r}.trainable", str(trainable), "flag", trainable)
                yield Part(f"layer {name!r}.dtype_policy", policy, "flag", policy)
                owners.update((id(v), trainable) for v in layer._trainable_variables)
        for variable in self._variables:
            flag = variable.trainable
            # A frozen layer is one reason, not one for each of its variables.
            text = "as its layer" if owners.get(id(variable)) == flag else str(flag)
            yield Part(f"variable {variable.path!r}.trainable", text, "flag", text)


def _inert(layer: Any) -> bool:
    """Whether a layer is Keras's own and has nothing that its flags could change."""
    own = type(layer).__module__.startswith("keras.src.layers.")
    return own and not layer._layers and not layer.variables
