"""torch's switchboard: calls a trick, or its fallback.

The engine reaches tricks only through this file, so each can be turned off (`shared/switches.py`)
or deleted alone. A recorded graph enters; an equivalent one leaves, which torch runs faster or
which needs less memory. A trick may import `torch`, private parts included, and whatever the engine
may import; nothing outside this folder imports tricks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch.fx import Graph, GraphModule

from trainstep._engines.shared.switches import is_on
from trainstep._engines.torch import private
from trainstep._engines.torch.tricks import forget_sources, rewrites, torchscript_replay
from trainstep._engines.torch.tricks.torchscript_replay import Replay

Module = TypeVar("Module", bound=GraphModule)


def forget_source(module: Module) -> Module:
    """Removes the source text of a module, which torch would keep for ever; returns the module."""
    return forget_sources.forgotten(module) if is_on("forget_sources") else module


def rewritten(module: Any) -> Any:
    """Returns an equivalent recorded step that inductor compiles to faster loops."""
    return rewrites.rewritten(module) if is_on("rewrites", private.fake_tensors()) else module


def skip_pooling_copies(graph: Graph) -> None:
    """Removes unneeded copies before max pooling."""
    if is_on("rewrites", private.fake_tensors()):
        rewrites.skip_pooling_copies(graph)


def replay(module: Any, switches: Sequence[int], written: Sequence[int]) -> Replay | None:
    """Returns a faster replay of a record than Python; None if both tricks for it are off."""
    lean, script = is_on("lean_graph"), is_on("torchscript_replay", private.script)
    if not lean and not script:
        return None
    return torchscript_replay.Replay(module, switches, written, lean=lean, script=script)
