"""Describes a trace before it happens: the signature, and the changes since earlier traces."""

from __future__ import annotations

import warnings
from typing import Any

from trainstep._common import user_code
from trainstep._common.errors import StaleCaptureWarning
from trainstep._explain.causes import OFTEN, trace_advice
from trainstep._explain.ledger import Ledger, TraceEvent
from trainstep._explain.signature import Change, Signature, nearest
from trainstep._function.program_cache import Programs
from trainstep._function.sizes.families import Call, DynamicSizes
from trainstep._function.sizes.pattern import Pattern, with_sizes

_OFTEN = 3  # this many new values of one captured name are worth a warning


class TraceReason:
    """Finds the reason for a trace of one function.

    Args:
        name: The name of the function.
        programs: Its programs.
        ledger: Its earlier traces.
        sizes: Its dynamic sizes.
        cells: Its closure cells.
    """

    def __init__(
        self, name: str, programs: Programs, ledger: Ledger, sizes: DynamicSizes, cells: Any
    ) -> None:
        self._name = name
        self._programs = programs
        self._ledger = ledger
        self._sizes = sizes
        self._cells = cells
        self._values: dict[str, set[str]] = {}  # changes so far, by the name of the captured value

    def event(self, call: Call, pattern: Pattern | None) -> tuple[Signature, TraceEvent]:
        """Returns the signature of a call, and the ledger entry that its trace will have."""
        flags = {p.label: p for watch in self._programs.watches() for p in watch.parts(self._cells)}
        signature = Signature([*call.parts, *flags.values()])
        index, changes = nearest(signature, self._ledger.signatures)
        if pattern is not None:
            signature = Signature([*with_sizes(call.parts, pattern), *flags.values()])
        texts = [self._describe(change, index) for change in changes]
        why_exact = "" if pattern is not None else self._sizes.why_exact(call)
        if index is not None and not texts:
            texts = ["the earlier program was dropped"]
            changes = [Change("object", texts[0])]
        if why_exact:
            texts.append(why_exact)
        event = TraceEvent(
            index=len(self._ledger) + 1,
            function=self._name,
            signature=str(signature),
            changes=tuple(texts),
            nearest=None if index is None else index + 1,
            site=call.site,
            advice=self._sizes.advice(pattern, why_exact)
            or trace_advice(change.kind for change in changes),
            kinds=tuple(change.kind for change in changes),
        )
        return signature, event

    def _describe(self, change: Change, index: int | None) -> str:
        """Describes a change; for a captured value, with the call that captured the old one.

        Warns at the third new value of one name: every step may cause a retrace.
        """
        if change.kind != "capture" or index is None:
            return change.text
        values = self._values.setdefault(change.text.partition(": ")[0], set())
        values.add(change.text)
        if len(values) == _OFTEN:
            values.add("")  # the warning is given once
            message = (
                f"`{self._name}`: {change.text}, again.\n"
                f"  what happens: {OFTEN.happens}\n"
                f"  to fix:       {OFTEN.cure}"
            )
            warnings.warn(message, StaleCaptureWarning, stacklevel=user_code.depth())
        return f"{change.text} (since the call at {self._ledger[index].site})"
