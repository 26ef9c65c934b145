"""torch's switchboard: the plain way to do a thing, or the trick that does it faster.

The engine asks here and nowhere else, so each trick can be turned off (`shared/switches.py`) or
deleted alone. A recorded graph enters; one of the same numbers leaves, which torch runs faster or
keeps less of. A trick may import `torch`, private parts included, and what the engine may; nothing
outside this folder imports a trick.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch.fx import Graph, GraphModule

from trainstep._engines.shared.switches import is_on
from trainstep._engines.torch.tricks import forget_sources, rewrites, torchscript_replay
from trainstep._engines.torch.tricks.torchscript_replay import Replay

Module = TypeVar("Module", bound=GraphModule)


def forget_source(module: Module) -> Module:
    """The same module, without the text that torch would keep for ever."""
    return forget_sources.forgotten(module) if is_on("forget_sources") else module


def rewritten(module: Any) -> Any:
    """A recorded step of the same numbers that inductor compiles to faster loops."""
    return rewrites.rewritten(module) if is_on("rewrites") else module


def skip_pooling_copies(graph: Graph) -> None:
    """Removes the copies before max pooling that nothing needs."""
    if is_on("rewrites"):
        rewrites.pool_where_images_lie(graph)


def replay(module: Any, switches: Sequence[int], written: Sequence[int]) -> Replay | None:
    """Runs a record faster than Python would; None if both ways to do so are off."""
    lean, script = is_on("lean_graph"), is_on("torchscript_replay")
    if not lean and not script:
        return None
    return torchscript_replay.Replay(module, switches, written, lean=lean, script=script)
