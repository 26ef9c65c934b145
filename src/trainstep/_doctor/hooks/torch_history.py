"""What PyTorch has compiled so far: which programs are of one function, and why there is one more.

PyTorch keeps programs by the code of a function. Two models of one class share them, and so do two
closures of one `def`; each that lives is a function of its own here.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import NamedTuple

from trainstep._common import user_code
from trainstep._doctor.hooks.function_identity import Objects
from trainstep._doctor.hooks.torch_frames import Subject
from trainstep._doctor.hooks.torch_guards import Reason, cause, from_tensors
from trainstep._doctor.hooks.torch_paths import Scope
from trainstep._doctor.records import NOWHERE, Cause, Site, Trace
from trainstep._explain.signature import Signature

# Causes that come of a new function object, if there is one.
_OF_OBJECTS = ("capture", "number", "static", "object", "function", "structure")


class Identity(NamedTuple):
    """Which function it is.

    Attributes:
        group: The group of its traces.
        is_new: Whether its function object is seen for the first time.
        replaces: The kind of cause, if it came in the place of an earlier one.
    """

    group: str
    is_new: bool
    replaces: str


class Program(NamedTuple):
    """What is kept of a program."""

    trace: Trace
    signature: Signature


class History:
    """All programs that there have been."""

    def __init__(self) -> None:
        self._programs: dict[str, Program] = {}
        self._modes: dict[str, set[str]] = {}
        self._objects = Objects()
        self._groups: dict[tuple[types.CodeType, int], str] = {}
        self._latest: dict[types.CodeType, str] = {}
        self._reset = NOWHERE

    def identity(self, subject: Subject, name: str) -> Identity:
        """Which function it is that a frame is compiled of."""
        code = subject.code
        if subject.fn is None:
            return Identity(self._latest.setdefault(code, name), False, "")
        number, new = self._objects.number(subject.fn, name)
        key, replaces = (code, number), ""
        if new and number > 1 and self._objects.is_own(subject.fn, name):
            self._groups[key] = f"{name}#{number}"
        elif new:
            self._groups[key] = self._latest.get(code, name)
            is_method = isinstance(subject.fn, types.MethodType)
            replaces = ("instance" if is_method else "function") if number > 1 else ""
        self._latest[code] = self._groups[key]
        return Identity(self._groups[key], new, replaces)

    def add(self, number: str, program: Program) -> None:
        """A program was made, to which PyTorch gave a number."""
        self._programs[number] = program

    def program(self, number: str) -> Program | None:
        """The program with a number of PyTorch's."""
        return self._programs.get(number)

    def reset(self, where: Site) -> None:
        """All programs were dropped."""
        self._reset = where
        self._programs.clear()

    def causes(
        self, program: Program, told: Sequence[Reason], scope: Scope, replaces: str
    ) -> tuple[list[Cause], Reason | None]:
        """Why a program is made, and the reason of PyTorch's that counts."""
        trace = program.trace
        modes = self._modes.setdefault(trace.group, set())
        known, first = trace.mode in modes, not modes
        modes.add(trace.mode)
        if first or (not known and not told):
            return [], None
        if not known:
            return [Cause("mode", f"the first one in this mode: {trace.mode or 'training'}")], None
        if not told:
            return self._dropped(), None
        reason, found = self._nearest(trace, told, scope)
        earlier = self._programs.get(reason.program)
        causes = [found]
        if earlier is not None:
            trace.nearest = earlier.trace.number
            causes = from_tensors(found, program.signature.changes(earlier.signature))
        if replaces and found.kind in _OF_OBJECTS:
            what = "an object of its class" if replaces == "instance" else "a function"
            causes = [Cause(replaces, f"{what} that was made anew; {found.text}")]
        return causes, reason

    def _nearest(self, trace: Trace, told: Sequence[Reason], scope: Scope) -> tuple[Reason, Cause]:
        """What a program differs in from the latest of its mode."""
        pairs = [(reason, cause(reason, scope)) for reason in told]
        same = [pair for pair in pairs if self._mode_of(pair[0]) == (trace.group, trace.mode)]
        changed = [pair for pair in (*same, *pairs) if pair[1].kind != "mode"]
        return (changed or pairs)[0]

    def _mode_of(self, reason: Reason) -> tuple[str, str] | None:
        program = self._programs.get(reason.program)
        return None if program is None else (program.trace.group, program.trace.mode)

    def _dropped(self) -> list[Cause]:
        if not self._reset.file:
            return []
        where = user_code.name(*self._reset[:2])
        return [Cause("unknown", f"`torch._dynamo.reset()` at {where} dropped all programs")]
