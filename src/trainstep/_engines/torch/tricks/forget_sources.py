"""torch: the texts of our records, which torch would keep for ever, are forgotten.

Each graph that becomes a module is written down as Python, and its text kept for tracebacks: four
times for a step, a third of a megabyte for thirty layers, and none of it goes when its model does.
"""

from __future__ import annotations

import linecache
from typing import TypeVar

from torch.fx import GraphModule, graph_module

Module = TypeVar("Module", bound=GraphModule)


def forgotten(module: Module) -> Module:
    """The same module, of which torch keeps no text; that of the next `recompile` is another."""
    name = module.forward.__code__.co_filename
    if graph_module._loader.eval_cache.pop(name, None) is not None:
        linecache.cache.pop(name, None)
    return module
