"""Uses JAX's disk cache for the programs of trainstep, and for no others.

JAX has one cache per process, whose folder is the user's configuration. If the user has set a
folder, it is used. Otherwise ours is set during each compilation.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from trainstep._common import disk_cache
from trainstep._engines.jax.private import config

_HIT = "/jax/compilation_cache/cache_hits"
_SECONDS = 0.1  # programs that compile faster are not stored
_lock = threading.Lock()
_local = threading.local()


def _count(event: str, **_: Any) -> None:
    if event == _HIT and getattr(_local, "compiling", False):
        _local.hits = hits() + 1


def hits() -> int:
    """Returns the number of programs that this thread has found on disk."""
    return getattr(_local, "hits", 0)


@contextlib.contextmanager
def on_disk() -> Iterator[None]:
    """Enables the disk cache for compilations in this block."""
    folder = None if config is None else disk_cache.folder("jax", jax.__version__)
    users = jax.config.jax_compilation_cache_dir
    _local.compiling = True
    jax.monitoring.register_event_listener(_count)
    try:
        if folder is None or users is not None:
            yield
            return
        with _lock:  # JAX has one cache, which it opens once and then keeps
            compilation_cache.reset_cache()
            try:
                with (
                    config.compilation_cache_dir(folder),
                    config.persistent_cache_min_compile_time_secs(_SECONDS),
                ):
                    yield
            finally:
                compilation_cache.reset_cache()
    finally:
        jax.monitoring.unregister_event_listener(_count)
        _local.compiling = False
