"""Validity of a program: flags and captured values have to be the same as in the trace.

A step does something else after a change of `layer.trainable`, of `layer.dtype_policy` or of a
captured number, so every cache hit compares them. Layers are referenced weakly, because a program
must not keep a model alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter, call, itemgetter
from typing import Any

from trainstep._common.codegen import Source, define
from trainstep._explain.signature import Part, distinct
from trainstep._state.random_seeds import adopt, other_generator
from trainstep._surroundings.captures import Captures

Stale = Callable[[list[tuple[str, str, str]]], None]
_FLAGS_OF_LAYERS = ("_trainable", "_dtype_policy")
_CHUNK = 60  # larger lists are allocated by malloc instead of Python's allocator, which is slow


class Watch:
    """The flags and captured values of a trace, to compare with those of later calls.

    Args:
        models: The models and layers that the step called.
        reads: The variables that it read.
        writes: The variables that it wrote.
        captures: The values that it captured.
        stale: Called with the changes of captured values. It raises, or returns to let the program
            serve on. None: a program with changes does not serve.

    Attributes:
        flags_changed: An expression that is true if a flag has changed.
        captures_changed: An expression that is true if a captured value has changed, or may have;
            `cells` in it are the closure cells of the function. Empty if there are none.
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
        self._generator_changed = other_generator(reads)
        pieces = [piece for piece in (captures.source, self._generator_changed) if piece.text]
        self.captures_changed = Source(
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
        # Of the variables without a layer, those that are not trainable and yet written are slots
        # and metric state, whose flag has no effect.
        written = {id(v) for v in writes}
        own = {
            id(v): v for v in reads if id(v) not in owned and (v.trainable or id(v) not in written)
        }
        self._layers = [weakref.ref(layer) for layer in layers.values()]
        self._names = distinct(layer.name for layer in layers.values())
        self._variables = [*owned.values(), *own.values()]
        changed = self.flags_changed = _comparison(self._layers, self._variables)
        self._flags_differ = define("differ()", f"return {changed.text}", changed.names)

    def holds(self, cells: Any) -> bool:
        """Whether flags and captured values are those of the trace, given the closure cells."""
        try:
            if self._flags_differ():
                return False
        except AttributeError:  # a layer was freed, so no later call can use this program
            return False
        if not self._captures.holds(cells):
            if self._stale is None:
                return False
            self._stale(list(self._captures.changes(cells)))
            self._captures.accept(cells)
        if self._generator_changed.text:
            adopt()
        return True

    def parts(self, cells: Any) -> Iterator[Part]:
        """Yields the current flags and captured values, for a signature."""
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
            # A frozen layer is one change, not one per variable.
            text = "as its layer" if owners.get(id(variable)) == flag else str(flag)
            yield Part(f"variable {variable.path!r}.trainable", text, "flag", text)


def _comparison(layers: Sequence[Any], variables: Sequence[Any]) -> Source:
    """Compares the flags of layers, which are weak references, and of variables."""
    texts: list[str] = []
    names: dict[str, Any] = {"live": call}

    def compare(owners: Sequence[Any], values: str, flag: Callable[[Any], Any]) -> None:
        for first in range(0, len(owners), _CHUNK):
            count = len(texts)
            found = f"[*map(flag{count}, {values.format(f'owners{count}')})]"
            names[f"flag{count}"], names[f"owners{count}"] = flag, owners[first : first + _CHUNK]
            names[f"seen{count}"] = define("look()", f"return {found}", names)()
            texts.append(f"{found} != seen{count}")

    compare(layers, "map(live, {})", attrgetter(*_FLAGS_OF_LAYERS))
    # Reads the variables' `__dict__`, which the run reads next anyway.
    compare([v.__dict__ for v in variables], "{}", itemgetter("_trainable"))
    return Source(" or ".join(texts) or "False", names)


def _inert(layer: Any) -> bool:
    """Whether a layer is one of Keras without variables or sublayers, so its flags do nothing."""
    own = type(layer).__module__.startswith("keras.src.layers.")
    return own and not layer._layers and not layer.variables
