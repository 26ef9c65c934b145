"""Graph breaks: the user's line and the code that PyTorch cannot compile."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from trainstep._common import user_code
from trainstep._doctor.hooks.call_sites import at
from trainstep._doctor.hooks.watcher import Watcher
from trainstep._doctor.records import Incident, Site, Trace

# Patterns of PyTorch's reasons, and a text for each; a group fills the `{}`.
_WORDS = (
    (r"generic_jump|Data-dependent branching", "Python branches on the value of a tensor"),
    (r"Unsupported Tensor\.item\(\)", "a tensor becomes a Python number (`.item()`, `float()`)"),
    (
        r"Data[- ]dependent operator",
        "a result other than a tensor depends on the value of a tensor",
    ),
    (r"Unsupported Tensor\.backward\(\)", "`backward()` is called"),
    (r"Call to `torch\._dynamo\.graph_break", "`torch._dynamo.graph_break()` is called"),
    (r"Failed to trace builtin operator[\s\S]*?builtin operator `(\w+)`", "`{}` is called"),
    (r"marked as skipped[\s\S]*?function `([^`]+)`", "`{}` is called"),
    (r"function marked as skipped[\s\S]*?name: (\w+)", "`{}` is called"),
)
_LONG = 120


class Breaks:
    """Records graph breaks, with one text per line of the user's."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._known: dict[tuple[str, int], tuple[str, str]] = {}

    def note(self, reason: str, stack: Iterable[Any], trace: Trace, *, whole: bool = False) -> None:
        """Records a graph break.

        Args:
            reason: PyTorch's message.
            stack: The stack at the break, innermost last.
            trace: The trace in which it occurred.
            whole: Whether the whole function stays uncompiled because of it.
        """
        site = _users(stack)
        what = f"graph break: {in_user_terms(reason)}"
        if site is None:
            where = "Keras" if trace.group.startswith("keras:") else "a library"
            site = trace.called._replace(function=trace.function)
            what = f"graph break inside {where}: {in_user_terms(reason)}"
        if whole:
            what += "; the whole function runs uncompiled"
        function, what = self._known.setdefault(site[:2], (site.function, what))
        self._watcher.log.note(
            Incident(kind="graph-breaks", engine="torch", function=function, site=site, what=what)
        )


def _users(stack: Iterable[Any]) -> Site | None:
    """The innermost user line of a stack."""
    for each in reversed(list(stack)):
        if not user_code.is_installed(each.filename):
            name = re.sub(r"torch_dynamo_resume_in_(.+)_at_\d+", r"\1", each.name)
            return at(each.filename, each.lineno, name)
    return None


def in_user_terms(reason: str) -> str:
    """The reason of a graph break, in one line."""
    for pattern, words in _WORDS:
        match = re.search(pattern, reason)
        if match is not None:
            return words.format(*match.groups())
    first = reason.strip().partition("\n")[0]
    return first if len(first) <= _LONG else f"{first[: _LONG - 3]}..."
