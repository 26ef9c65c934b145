"""Trick: deletes the source text of recorded graphs, which torch would keep for ever.

torch generates Python code for each graph module and keeps its text for tracebacks: four times for
a step, a third of a megabyte for thirty layers, and all of it outlives the model. It has no effect
on a torch that keeps no such cache.
"""

from __future__ import annotations

import linecache
from typing import TypeVar

from torch.fx import GraphModule, graph_module

Module = TypeVar("Module", bound=GraphModule)


def forgotten(module: Module) -> Module:
    """Deletes the source text of a module and returns the module; `recompile` creates it again."""
    name = module.forward.__code__.co_filename
    cache = getattr(getattr(graph_module, "_loader", None), "eval_cache", {})
    if cache.pop(name, None) is not None:
        linecache.cache.pop(name, None)
    return module
