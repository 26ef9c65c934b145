"""Graph breaks: the user's line, and what it is there that PyTorch cannot compile."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from trainstep._common import user_code
from trainstep._doctor.hooks.call_sites import at
from trainstep._doctor.hooks.watcher import Watcher
from trainstep._doctor.records import Happened, Site, Trace

# What the first lines of a reason say, and in other words. A group is a name in the explanation.
_WORDS = (
    (r"generic_jump|Data-dependent branching", "Python branches on the value of a tensor"),
    (r"Unsupported Tensor\.item\(\)", "a number is taken out of a tensor (`.item()`, `float()`)"),
    (r"Data[- ]dependent operator", "the value of a tensor decides on a result that is no tensor"),
    (r"Unsupported Tensor\.backward\(\)", "`backward()` is called"),
    (r"Call to `torch\._dynamo\.graph_break", "`torch._dynamo.graph_break()` asks for it"),
    (r"Failed to trace builtin operator[\s\S]*?builtin operator `(\w+)`", "`{}` is called"),
    (r"marked as skipped[\s\S]*?function `([^`]+)`", "`{}` is called"),
    (r"function marked as skipped[\s\S]*?name: (\w+)", "`{}` is called"),
)
_LONG = 120


class Breaks:
    """Notes graph breaks, one for each line of the user's."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._known: dict[tuple[str, int], tuple[str, str]] = {}

    def note(self, reason: str, stack: Iterable[Any], trace: Trace, *, whole: bool = False) -> None:
        """A graph broke.

        Args:
            reason: PyTorch's words.
            stack: Where it was, the innermost last.
            trace: That it was in.
            whole: Whether PyTorch gave up on the whole function for it.
        """
        site = _users(stack)
        what = f"the graph breaks: {in_words(reason)}"
        if site is None:
            where = "Keras" if trace.group.startswith("keras:") else "a library"
            site = trace.called._replace(function=trace.function)
            what = f"the graph breaks inside {where}: {in_words(reason)}"
        if whole:
            what += "; all of the function runs uncompiled"
        function, what = self._known.setdefault(site[:2], (site.function, what))
        self._watcher.log.note(
            Happened(kind="graph-breaks", engine="torch", function=function, site=site, what=what)
        )


def _users(stack: Iterable[Any]) -> Site | None:
    """The innermost line of the user's."""
    for each in reversed(list(stack)):
        if not user_code.is_installed(each.filename):
            name = re.sub(r"torch_dynamo_resume_in_(.+)_at_\d+", r"\1", each.name)
            return at(each.filename, each.lineno, name)
    return None


def in_words(reason: str) -> str:
    """Why a graph broke, in one line."""
    for pattern, words in _WORDS:
        match = re.search(pattern, reason)
        if match is not None:
            return words.format(*match.groups())
    first = reason.strip().partition("\n")[0]
    return first if len(first) <= _LONG else f"{first[: _LONG - 3]}..."
