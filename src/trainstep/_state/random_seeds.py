"""`keras.random` without a seed, inside a step: new draws at each step, reproducible.

Keras then draws from one generator of the process, which `keras.utils.set_random_seed` throws away
and makes anew. A compiled step reads and writes the state of the generator that it was traced with.
So the first one that a step draws from stays the global one: when Keras has another, its state is
taken over, and nothing is traced again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from keras.src.backend.common import global_state
from keras.src.random import seed_generator

from trainstep._common.codegen import Source
from trainstep._state.scopes import active, no_scope

_NAME = seed_generator.GLOBAL_SEED_GENERATOR
_MISSING: Any = object()
_kept: list[Any] = []  # the generator, once a step has drawn from it


@contextlib.contextmanager
def traced_seeds() -> Iterator[None]:
    """Lets a step that is being traced draw from the global generator.

    On JAX Keras refuses that in a trace, since the draws would be constants of it; here the
    generator's state is state of the step.
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
    """Takes over the state of the generator that Keras has now, if it is another one."""
    if not _kept:
        return
    now = getattr(global_state.GLOBAL_STATE_TRACKER, _NAME, _MISSING)
    if now is _kept[0]:
        return
    if now is not _MISSING:  # of a new thread there is nothing to take over
        with no_scope():
            now = now or seed_generator.SeedGenerator()
            _kept[0].state.assign(now.state.value)
    global_state.set_global_attribute(_NAME, _kept[0])


def other_generator(reads: Sequence[Any]) -> Source:
    """An expression that is true if Keras has another generator than a step that reads these."""
    if not _kept or not any(variable is _kept[0].state for variable in reads):
        return Source("")
    text = f"getattr(states.GLOBAL_STATE_TRACKER, {_NAME!r}, None) is not kept_generator"
    return Source(text, {"states": global_state, "kept_generator": _kept[0]})
