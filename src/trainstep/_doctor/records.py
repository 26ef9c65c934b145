"""What doctor notes while a script runs: plain facts, one JSON line each.

Records hold texts and numbers alone. A function, a model or a frame that was kept here would live
longer than without doctor, and some engines then reuse a program that they would have dropped.

    hook --note--> Log --> a line in the file, at once, and the record in memory
    file --read--> the same records, after a crash or a kill
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, ClassVar, NamedTuple


class Site(NamedTuple):
    """A line of the user's code."""

    file: str = ""
    line: int = 0
    text: str = ""
    function: str = ""  # that the line is in


NOWHERE = Site()


class Cause(NamedTuple):
    """One reason for a trace: its kind, a key of `_cures.CURES`, and what differs."""

    kind: str
    text: str


@dataclass(slots=True)
class Record:
    """What all records have.

    Attributes:
        at: Seconds since doctor started.
        process: The number of the process.
    """

    name: ClassVar[str] = ""

    at: float = 0.0
    process: int = 0


@dataclass(slots=True)
class Trace(Record):
    """A trace, or a compilation without one.

    Attributes:
        engine: `"jax"`, `"tensorflow"`, `"torch"` or `"trainstep"`.
        group: What tells functions apart: traces of one group are traces of one function.
        function: The function's name.
        defined: Where it is defined.
        called: The user's line that called.
        via: The Keras method that the user called, `"fit"` or `"validation inside fit"`, if any.
        mode: What makes a first trace of its own necessary: `"train"`, `"no grad"`.
        what: `"trace"`, `"compile"` for a compilation without one, or `"small"` for a program that
            an engine makes of a single operation outside of any function, or for itself.
        signature: What it was traced for, in the words of `_signature.Signature`.
        causes: Why, if it was not the first.
        nearest: The number of the earlier trace that `causes` compares with; 0 if there is none.
        number: Of this record, to refer to.
        inside: The number of the trace in which it happened; its time is counted there.
        seconds: What it cost, by phase: `trace`, `lower`, `compile`, `first_run`.
        from_disk: Whether the program came from a cache on disk.
        failed: The error that it ended in.
        note: Something to add, as "TensorFlow then traced a relaxed version: x float32[None,20]".
    """

    name: ClassVar[str] = "trace"

    engine: str = ""
    group: str = ""
    function: str = ""
    defined: Site = NOWHERE
    called: Site = NOWHERE
    via: str = ""
    mode: str = ""
    what: str = "trace"
    signature: str = ""
    causes: list[Cause] = field(default_factory=list)
    nearest: int = 0
    number: int = 0
    inside: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    from_disk: bool = False
    failed: str = ""
    note: str = ""


@dataclass(slots=True)
class Happened(Record):
    """Something else that the user should know of.

    Attributes:
        kind: A key of `_advice.FINDINGS`.
        engine: The engine.
        group: The group of the traces of the function that it is about, if there are any.
        function: The function's name.
        site: The user's line.
        what: The fact, in a few words.
        detail: The kind of side effect (`_advice.EFFECTS`), or of advice.
        value: What belongs to the fact: a frozen value, a reason, lines that assign.
        before: The value that a program holds.
        now: The value that there is now.
        noticed: Where that was noticed; empty: at the end.
        count: How often it happened.
    """

    name: ClassVar[str] = "happened"

    kind: str = ""
    engine: str = ""
    group: str = ""
    function: str = ""
    site: Site = NOWHERE
    what: str = ""
    detail: str = ""
    value: str = ""
    before: str = ""
    now: str = ""
    noticed: Site = NOWHERE
    count: int = 1


@dataclass(slots=True)
class Calls(Record):
    """How often the functions of a group were called, where that is known, and when."""

    name: ClassVar[str] = "calls"

    group: str = ""
    count: int = 0
    times: list[float] = field(default_factory=list)  # of some


@dataclass(slots=True)
class Span(Record):
    """A call of a Keras method such as `fit`, from `at` on."""

    name: ClassVar[str] = "span"

    what: str = ""
    site: Site = NOWHERE
    seconds: float = 0.0


@dataclass(slots=True)
class Note(Record):
    """Something about doctor itself: a hook that does not fit, a process that was watched."""

    name: ClassVar[str] = "note"

    text: str = ""


@dataclass(slots=True)
class Start(Record):
    """The first record of a process."""

    name: ClassVar[str] = "start"

    command: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    when: float = 0.0  # since the epoch


@dataclass(slots=True)
class End(Record):
    """The last record of a process that ended by itself."""

    name: ClassVar[str] = "end"

    versions: dict[str, str] = field(default_factory=dict)
    error: str = ""


_KINDS: dict[str, type[Any]] = {
    kind.name: kind for kind in (Trace, Happened, Calls, Span, Note, Start, End)
}
_SITES = ("defined", "called", "site", "noticed")


class Log:
    """The records of one process.

    Args:
        path: A file to whose end each is written at once, if any. A line is one write, so that
            processes may share a file.
    """

    def __init__(self, path: str | None = None) -> None:
        self.records: list[Any] = []
        mode = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = None if path is None else os.open(path, mode, 0o644)
        self._began = perf_counter()
        self._numbers = 0
        self._lock = threading.RLock()

    def elapsed(self) -> float:
        """Seconds since the log began."""
        return perf_counter() - self._began

    def begin(self, trace: Trace) -> None:
        """Gives a trace its number and its moment; it is noted when it has ended."""
        with self._lock:
            self._numbers += 1
            trace.number, trace.at = self._numbers, round(self.elapsed(), 4)

    def note(self, record: Record) -> Any:
        """Adds a record."""
        with self._lock:
            record.process = os.getpid()
            record.at = record.at or round(self.elapsed(), 4)
            self.records.append(record)
            self._write(record)
        return record

    def again(self, record: Trace) -> None:
        """Writes a trace again, of which more is known now."""
        with self._lock:
            self._write(record)

    def _write(self, record: Record) -> None:
        if self._file is not None:
            os.write(self._file, (json.dumps(to_dict(record)) + "\n").encode())

    def close(self) -> None:
        """No more is written."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None


def to_dict(record: Record) -> dict[str, Any]:
    """A record as it is written: what is not said is as it is by default."""
    said = {"record": record.name}
    for each in dataclasses.fields(record):
        value = getattr(record, each.name)
        if value:
            said[each.name] = value
    return said


def from_dict(said: Mapping[str, Any]) -> Any:
    """The record that was written."""
    values = {name: value for name, value in said.items() if name != "record"}
    for name in _SITES:
        if name in values:
            values[name] = Site(*values[name])
    if "causes" in values:
        values["causes"] = [Cause(*cause) for cause in values["causes"]]
    return _KINDS[said["record"]](**values)


def read(lines: Iterable[str]) -> list[Any]:
    """The records of a file; the last line of a killed process may be cut."""
    found: list[Any] = []
    numbered: dict[tuple[int, int], int] = {}
    for line in lines:
        try:
            record = from_dict(json.loads(line))
        except (ValueError, KeyError, TypeError):
            continue
        key = (record.process, getattr(record, "number", 0))
        if key[1] and key in numbered:
            found[numbered[key]] = record
            continue
        if key[1]:
            numbered[key] = len(found)
        found.append(record)
    return found
