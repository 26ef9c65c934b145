"""Records: the facts that hooks collect while a script runs, one JSON line each.

Records contain only text and numbers. A reference to a function, model or frame would keep it
alive, and some engines would then reuse a program that they would have dropped.

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
    function: str = ""  # the function that contains the line


NOWHERE = Site()


class Cause(NamedTuple):
    """One reason for a trace: its kind (a key of `_explain.causes.CURES`) and the difference."""

    kind: str
    text: str


@dataclass(slots=True)
class Record:
    """The base of all records.

    Attributes:
        at: Seconds since doctor started.
        process: The process id.
    """

    name: ClassVar[str] = ""

    at: float = 0.0
    process: int = 0


@dataclass(slots=True)
class Trace(Record):
    """A trace, or a compilation without a trace.

    Attributes:
        engine: `"jax"`, `"tensorflow"`, `"torch"` or `"trainstep"`.
        group: The identity of the function: all traces of one function have the same group.
        function: The function's name.
        defined: The line of its definition.
        called: The user's line that called it.
        via: The Keras method that the user called, `"fit"` or `"validation inside fit"`, if any.
        mode: `"train"`, `"no grad"` and the like; each mode needs one trace.
        what: `"trace"`, `"compile"` (without a trace) or `"small"`: a program of a single operation
            outside any function, or of the engine's own.
        signature: The arguments it was traced for, as `_explain.signature.Signature` prints them.
        causes: The causes, if it was not the first.
        nearest: The number of the earlier trace that `causes` compares with; 0 if there is none.
        number: The number of this record, for references.
        inside: The number of the enclosing trace, which includes its time.
        seconds: Its cost by phase: `trace`, `lower`, `compile`, `first_run`.
        from_disk: Whether the program came from the disk cache.
        failed: The error that ended it.
        note: An additional remark, shown as it is.
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
class Incident(Record):
    """A fact besides a trace that becomes a finding.

    Attributes:
        kind: A key of `_explain.causes.FINDINGS`.
        engine: The engine.
        group: The group of the function concerned, if it was traced.
        function: The function's name.
        site: The user's line.
        what: The fact, in one line.
        detail: The kind of side effect (a key of `_explain.causes.EFFECTS`), or of advice.
        value: A frozen value, a reason, or the lines that assign.
        before: The value inside the program.
        now: The current value.
        noticed: The line at which doctor noticed it; empty: the end of the run.
        count: The number of occurrences.
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
    """The number of calls of a function, where known, and the times of some."""

    name: ClassVar[str] = "calls"

    group: str = ""
    count: int = 0
    times: list[float] = field(default_factory=list)  # of the first calls only


@dataclass(slots=True)
class Span(Record):
    """A call of a Keras method such as `fit`; it starts at `at`."""

    name: ClassVar[str] = "span"

    what: str = ""
    site: Site = NOWHERE
    seconds: float = 0.0


@dataclass(slots=True)
class Note(Record):
    """A limit of this report: a hook that does not fit, a number that is not known."""

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
    """The last record of a process that was not killed."""

    name: ClassVar[str] = "end"

    versions: dict[str, str] = field(default_factory=dict)
    error: str = ""


_KINDS: dict[str, type[Any]] = {
    kind.name: kind for kind in (Trace, Incident, Calls, Span, Note, Start, End)
}
_SITES = ("defined", "called", "site", "noticed")


class Log:
    """The records of one process.

    Args:
        path: A file to which each record is appended at once. Each line is one write, so several
            processes can share the file.
    """

    def __init__(self, path: str | None = None) -> None:
        self.records: list[Any] = []
        mode = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = None if path is None else os.open(path, mode, 0o644)
        self._began = perf_counter()
        self._last_number = 0
        self._lock = threading.RLock()

    def elapsed(self) -> float:
        """Seconds since the log was opened."""
        return perf_counter() - self._began

    def begin(self, trace: Trace) -> None:
        """Assigns a number and a start time to a trace; `note` adds it when it has ended."""
        with self._lock:
            self._last_number += 1
            trace.number, trace.at = self._last_number, round(self.elapsed(), 4)

    def note(self, record: Record) -> Any:
        """Adds a record."""
        with self._lock:
            record.process = os.getpid()
            record.at = record.at or round(self.elapsed(), 4)
            self.records.append(record)
            self._write(record)
        return record

    def again(self, record: Trace) -> None:
        """Rewrites a trace to the file, with what became known since."""
        with self._lock:
            self._write(record)

    def _write(self, record: Record) -> None:
        if self._file is not None:
            os.write(self._file, (json.dumps(to_dict(record)) + "\n").encode())

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None


def to_dict(record: Record) -> dict[str, Any]:
    """The record as JSON; fields with an empty value are omitted."""
    fields = {"record": record.name}
    for each in dataclasses.fields(record):
        value = getattr(record, each.name)
        if value:
            fields[each.name] = value
    return fields


def from_dict(fields: Mapping[str, Any]) -> Any:
    """The record of a JSON line."""
    values = {name: value for name, value in fields.items() if name != "record"}
    for name in _SITES:
        if name in values:
            values[name] = Site(*values[name])
    if "causes" in values:
        values["causes"] = [Cause(*cause) for cause in values["causes"]]
    return _KINDS[fields["record"]](**values)


def read(lines: Iterable[str]) -> list[Any]:
    """The records of a file. The last line of a killed process may be incomplete."""
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
