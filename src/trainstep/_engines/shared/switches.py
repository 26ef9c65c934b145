"""Turns tricks on and off.

A trick only makes programs faster. `TRAINSTEP_TRICKS=off` turns all of them off, and
`TRAINSTEP_TRICKS=name,name` turns off the named ones. Results are the same either way, so this is
the first thing to try when something looks wrong.

    TRAINSTEP_TRICKS --is_on(name)--> an engine's switchboard: the trick, or the fallback
"""

from __future__ import annotations

import functools
import os
from typing import Any

from trainstep._common.errors import ArgumentError
from trainstep._common.private_names import is_hidden

VARIABLE = "TRAINSTEP_TRICKS"
# The tricks of every engine; its switchboard (`<engine>/tricks/__init__.py`) checks each.
TRICKS = {
    "jax": (
        "cpu_libraries",
        "donation",
        "input_buffers",
        "packed_variables",
        "rewrites",
        "row_buffers",
    ),
    "tensorflow": ("flat_call", "fused_batch_norm", "rewrites"),
    "torch": ("lean_graph", "forget_sources", "rewrites", "torchscript_replay"),
}


def is_on(name: str, *needed: Any) -> bool:
    """Whether the trick of this name is on; `needed` are private modules, None if missing."""
    if is_hidden() or any(each is None for each in needed):
        return False
    return name not in _turned_off(os.environ.get(VARIABLE, ""))


@functools.cache
def _turned_off(setting: str) -> frozenset[str]:
    known = {name for names in TRICKS.values() for name in names}
    if setting.strip() == "off":
        return frozenset(known)
    named = {name.strip() for name in setting.split(",")} - {""}
    if unknown := sorted(named - known):
        raise ArgumentError(
            "the environment",
            VARIABLE,
            f"`off`, or names of tricks: {', '.join(sorted(known))}",
            ", ".join(unknown),
            f"correct or unset {VARIABLE}",
        )
    return frozenset(named)
