"""Trick: torch forgets the source text of our recorded graphs, which it would keep for ever.

torch writes each graph that becomes a module as Python and keeps the text for tracebacks: four
times for a step, a third of a megabyte for thirty layers, and all of it outlives the model.
"""

from __future__ import annotations

import linecache
from typing import TypeVar

from torch.fx import GraphModule, graph_module

Module = TypeVar("Module", bound=GraphModule)


def forgotten(module: Module) -> Module:
    """The same module, without its text; a later `recompile` writes another."""
    name = module.forward.__code__.co_filename
    cache = getattr(getattr(graph_module, "_loader", None), "eval_cache", {})
    if cache.pop(name, None) is not None:
        linecache.cache.pop(name, None)
    return module
