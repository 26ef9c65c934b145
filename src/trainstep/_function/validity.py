"""What a program was compiled for besides its arguments: flags, and the values around the step.

Setting `layer.trainable` or `layer.dtype_policy` between calls changes what a step would do, so
every hit compares them; and so it does a number that the step took from around it. Layers are held
weakly: a program must not keep a model alive.
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
_CHUNK = 60  # a list of more is not in Python's own heap, but in the process's, which is slow


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
        flags: An expression that is true if a flag is not as it was seen.
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
        self.flags = _comparison(self._layers, self._variables)
        self._differ = define("differ()", f"return {self.flags.text}", self.flags.names)

    def holds(self, cells: Any) -> bool:
        """Whether all is as it was at the trace; `cells` is the closure of the function."""
        try:
            if self._differ():
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


def _comparison(layers: Sequence[Any], variables: Sequence[Any]) -> Source:
    """Whether the flags of layers, which are weak references, and of variables have changed."""
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
    # The variables' own dicts, which the run reads next.
    compare([v.__dict__ for v in variables], "{}", itemgetter("_trainable"))
    return Source(" or ".join(texts) or "False", names)


def _inert(layer: Any) -> bool:
    """Whether a layer is Keras's own and has nothing that its flags could change."""
    own = type(layer).__module__.startswith("keras.src.layers.")
    return own and not layer._layers and not layer.variables
