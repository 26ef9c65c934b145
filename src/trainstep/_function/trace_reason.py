"""A trace in words, ahead of the trace: what the call is, how it differs from those before."""

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

_OFTEN = 3  # new values of one name


class Announcer:
    """Says why a function is traced.

    Args:
        name: Of the function.
        programs: Those that there are.
        ledger: Of the traces before.
        sized: What knows which sizes vary.
        cells: The closure of the function.
    """

    def __init__(
        self, name: str, programs: Programs, ledger: Ledger, sized: DynamicSizes, cells: Any
    ) -> None:
        self._name = name
        self._programs = programs
        self._ledger = ledger
        self._sized = sized
        self._cells = cells
        self._values: dict[str, set[str]] = {}  # of what the step took from around it

    def event(self, call: Call, pattern: Pattern | None) -> tuple[Signature, TraceEvent]:
        """What this call is, and how it differs from the calls before, ahead of the trace."""
        flags = {p.label: p for watch in self._programs.watches() for p in watch.parts(self._cells)}
        signature = Signature([*call.parts, *flags.values()])
        index, changes = nearest(signature, self._ledger.signatures)
        if pattern is not None:
            signature = Signature([*with_sizes(call.parts, pattern), *flags.values()])
        texts = [self._told(change, index) for change in changes]
        against = "" if pattern is not None else self._sized.against(call)
        if index is not None and not texts:
            texts = ["the earlier program was dropped"]
            changes = [Change("object", texts[0])]
        if against:
            texts.append(against)
        event = TraceEvent(
            index=len(self._ledger) + 1,
            function=self._name,
            signature=str(signature),
            changes=tuple(texts),
            nearest=None if index is None else index + 1,
            site=call.site,
            advice=self._sized.advice(pattern, against)
            or trace_advice(change.kind for change in changes),
            kinds=tuple(change.kind for change in changes),
        )
        return signature, event

    def _told(self, change: Change, index: int | None) -> str:
        """A change in words; one of a value around the step with the call that saw the old one.

        The third new value of one name is worth a warning: this could go on at every step.
        """
        if change.kind != "capture" or index is None:
            return change.text
        values = self._values.setdefault(change.text.partition(": ")[0], set())
        values.add(change.text)
        if len(values) == _OFTEN:
            values.add("")  # told once
            message = (
                f"`{self._name}`: {change.text}, once more.\n"
                f"  what happens: {OFTEN.happens}\n"
                f"  to fix:       {OFTEN.cure}"
            )
            warnings.warn(message, StaleCaptureWarning, stacklevel=user_code.depth())
        return f"{change.text} (since the call at {self._ledger[index].site})"
