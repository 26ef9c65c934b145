"""`keras.random` without a seed inside a step: new numbers at each step, reproducibly.

Keras then uses one global generator, which `keras.utils.set_random_seed` replaces by a new one. A
compiled step reads and writes the RNG state of the generator that it was traced with. So the first
generator that a step uses stays the global one: when Keras has created another, its RNG state is
copied into the first, and no retrace is needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from trainstep._common.codegen import Source
from trainstep._common.keras_private import global_state, seed_generator
from trainstep._state.scopes import active, no_scope

_NAME = seed_generator.GLOBAL_SEED_GENERATOR
_MISSING: Any = object()
_kept: list[Any] = []  # the first generator, once a step has used it


@contextlib.contextmanager
def traced_seeds() -> Iterator[None]:
    """Lets a traced step use the global generator.

    On JAX, Keras refuses this in a trace, since the RNG state would be a constant of the program;
    here it is a variable of the step.
    """
    native = seed_generator.global_seed_generator

    def generator() -> Any:
        if active() is None:
            return native()
        if not _kept:
            found = global_state.get_global_attribute(_NAME)
            _kept.append(found or seed_generator.SeedGenerator())
            global_state.set_global_attribute(_NAME, _kept[0])
        return _kept[0]

    adopt()
    seed_generator.global_seed_generator = generator
    try:
        yield
    finally:
        seed_generator.global_seed_generator = native


def adopt() -> None:
    """Copies the RNG state of Keras's global generator, if it is another one, and replaces it."""
    if not _kept:
        return
    now = getattr(global_state.GLOBAL_STATE_TRACKER, _NAME, _MISSING)
    if now is _kept[0]:
        return
    if now is not _MISSING:  # a new thread has no generator yet
        with no_scope():
            now = now or seed_generator.SeedGenerator()
            _kept[0].state.assign(now.state.value)
    global_state.set_global_attribute(_NAME, _kept[0])


def other_generator(reads: Sequence[Any]) -> Source:
    """An expression: whether Keras's generator is not the one that a step with `reads` uses."""
    if not _kept or not any(variable is _kept[0].state for variable in reads):
        return Source("")
    text = f"getattr(states.GLOBAL_STATE_TRACKER, {_NAME!r}, None) is not kept_generator"
    return Source(text, {"states": global_state, "kept_generator": _kept[0]})
