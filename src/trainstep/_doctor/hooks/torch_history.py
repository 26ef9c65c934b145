"""The programs that PyTorch has compiled so far, grouped by function.

PyTorch stores programs by code, so two models of one class, or two closures of one `def`, share
them. Here each live object counts as a separate function.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import NamedTuple

from trainstep._common import user_code
from trainstep._doctor.hooks.function_identity import FunctionObjects
from trainstep._doctor.hooks.torch_frames import CompiledCode
from trainstep._doctor.hooks.torch_guards import Reason, all_changed_tensors, cause
from trainstep._doctor.hooks.torch_paths import Scope
from trainstep._doctor.records import NOWHERE, Cause, Site, Trace
from trainstep._explain.signature import Signature

# Causes that a new function object explains, if there is one.
_OF_OBJECTS = ("capture", "number", "static", "object", "function", "structure")


class Identity(NamedTuple):
    """The identity of a compiled function.

    Attributes:
        group: The group of its traces.
        is_new: Whether its function object is new.
        replaces: The kind of cause, if the object replaces an earlier one.
    """

    group: str
    is_new: bool
    replaces: str


class Program(NamedTuple):
    """The record and the signature of a program."""

    trace: Trace
    signature: Signature


class History:
    """All programs up to now."""

    def __init__(self) -> None:
        self._programs: dict[str, Program] = {}
        self._modes: dict[str, set[str]] = {}
        self._objects = FunctionObjects()
        self._groups: dict[tuple[types.CodeType, int], str] = {}
        self._latest: dict[types.CodeType, str] = {}
        self._reset = NOWHERE

    def identity(self, subject: CompiledCode, name: str) -> Identity:
        """The function that a frame belongs to."""
        code = subject.code
        if subject.fn is None:
            return Identity(self._latest.setdefault(code, name), False, "")
        number, new = self._objects.number(subject.fn, name)
        key, replaces = (code, number), ""
        if new and number > 1 and self._objects.is_separate_function(subject.fn, name):
            self._groups[key] = f"{name}#{number}"
        elif new:
            self._groups[key] = self._latest.get(code, name)
            is_method = isinstance(subject.fn, types.MethodType)
            replaces = ("instance" if is_method else "function") if number > 1 else ""
        self._latest[code] = self._groups[key]
        return Identity(self._groups[key], new, replaces)

    def add(self, number: str, program: Program) -> None:
        """Adds a program under PyTorch's compile id."""
        self._programs[number] = program

    def program(self, number: str) -> Program | None:
        """The program with a compile id."""
        return self._programs.get(number)

    def reset(self, where: Site) -> None:
        """Forgets all programs, after `torch._dynamo.reset()` at a line."""
        self._reset = where
        self._programs.clear()

    def causes(
        self, program: Program, failed: Sequence[Reason], scope: Scope, replaces: str
    ) -> tuple[list[Cause], Reason | None]:
        """The causes of a compilation, and the failed guard that they come from."""
        trace = program.trace
        modes = self._modes.setdefault(trace.group, set())
        known, first = trace.mode in modes, not modes
        modes.add(trace.mode)
        if first or (not known and not failed):
            return [], None
        if not known:
            return [Cause("mode", f"first program in this mode: {trace.mode or 'training'}")], None
        if not failed:
            return self._dropped(), None
        reason, found = self._nearest(trace, failed, scope)
        earlier = self._programs.get(reason.program)
        causes = [found]
        if earlier is not None:
            trace.nearest = earlier.trace.number
            causes = all_changed_tensors(found, program.signature.changes(earlier.signature))
        if replaces and found.kind in _OF_OBJECTS:
            what = "object of the same class" if replaces == "instance" else "function object"
            causes = [Cause(replaces, f"new {what}; {found.text}")]
        return causes, reason

    def _nearest(
        self, trace: Trace, failed: Sequence[Reason], scope: Scope
    ) -> tuple[Reason, Cause]:
        """The difference from the latest program in the same mode."""
        pairs = [(reason, cause(reason, scope)) for reason in failed]
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
