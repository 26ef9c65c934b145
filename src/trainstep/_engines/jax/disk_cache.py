"""JAX's own cache on disk, for what trainstep compiles and for nothing else.

JAX has one cache for the process, with a folder in its configuration, which belongs to the user.
If they have set one, it is used as it is. Otherwise ours is set for the time of a compilation.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import config
from jax.experimental.compilation_cache import compilation_cache

from trainstep._common import disk_cache

_HIT = "/jax/compilation_cache/cache_hits"
_SECONDS = 0.1  # what compiles faster is not worth a file
_lock = threading.Lock()
_local = threading.local()


def _count(event: str, **_: Any) -> None:
    if event == _HIT and getattr(_local, "compiling", False):
        _local.hits = hits() + 1


def hits() -> int:
    """How many programs this thread has found on disk."""
    return getattr(_local, "hits", 0)


@contextlib.contextmanager
def on_disk() -> Iterator[None]:
    """Lets JAX look on disk for what is compiled in here, and keep it there."""
    folder = disk_cache.folder("jax", jax.__version__)
    theirs = config.compilation_cache_dir.value
    _local.compiling = True
    jax.monitoring.register_event_listener(_count)
    try:
        if folder is None or theirs is not None:
            yield
            return
        with _lock:  # JAX has one cache, and opens it once
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
