"""torch: the text of a record, which torch keeps for ever, is forgotten.

Each graph that becomes a module is written down as Python, and its text kept for tracebacks: four
times for a step, a megabyte for thirty layers, and none of it goes when its model does.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx import graph_module

_loader = graph_module._loader


@contextmanager
def sources_forgotten() -> Iterator[None]:
    """Lets torch forget the texts of the modules that are made inside."""
    first = _loader.next_id
    try:
        yield
    finally:
        made = {f"<eval_with_key>.{index}" for index in range(first, _loader.next_id)}
        for name in list(_loader.eval_cache):
            if name.partition(" ")[0] in made:  # behind it, some say where they are from
                _loader.eval_cache.pop(name, None)
                linecache.cache.pop(name, None)
