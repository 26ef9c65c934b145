"""A step that was recorded once with dynamic sizes, and its programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainstep._engines import Traced
from trainstep._function.program_cache import Program
from trainstep._function.sizes.buckets import Account, Bucket, Buckets
from trainstep._function.sizes.pattern import Pattern
from trainstep._function.validity import Watch
from trainstep._state.locks import Domain
from trainstep._state.outputs import Build


@dataclass(eq=False)
class Family:
    """One record of a step, for all sizes that fit a pattern.

    Attributes:
        index: The index of its ledger entry.
        pattern: The shapes that it serves.
        traced: The record.
        buckets: The buckets; None if one program serves all sizes.
        programs: The programs by bucket; the key of a program for all sizes is `()`.
    """

    index: int
    compiler: str
    pattern: Pattern
    traced: Traced
    build: Build
    watch: Watch
    domain: Domain
    buckets: Buckets | None

    def __post_init__(self) -> None:
        self.names = self.pattern.names
        self.programs: dict[Bucket, Program] = {}
        self.warned: set[str] = set()  # violated assumptions that were reported

    def ordered(self, sizes: Mapping[str, int]) -> Bucket:
        """Returns sizes in the order of a bucket."""
        return tuple(sizes[name] for name in self.names)

    def served(self, sizes: Mapping[str, int]) -> Served | None:
        """Returns the program that serves these sizes, if one is compiled."""
        if self.buckets is None:
            return Served(self.programs[()], None, None) if self.programs else None
        wanted = self.ordered(sizes)
        bucket = self.buckets.serving(wanted)
        program = None if bucket is None else self.programs.get(bucket)
        if bucket is None or program is None:
            return None
        return Served(program, self.buckets, self.buckets.account(wanted, bucket))

    def compile(self, bucket: Bucket) -> Program:
        """Compiles the program for a bucket; this runs no Python of the user."""
        sizes = dict(zip(self.names, bucket, strict=True)) if self.buckets else None
        executable = self.traced.build(self.compiler, sizes)
        return Program(0, executable, self.build, self.watch, self.domain, family=self)

    def keep(self, bucket: Bucket, program: Program) -> None:
        """Stores a program, which serves from now on."""
        self.programs[bucket] = program
        if self.buckets is not None:
            self.buckets.compiled.append(bucket)

    def drop(self, program: Program) -> None:
        """Drops a program."""
        for bucket in [b for b, kept in self.programs.items() if kept is program]:
            if self.buckets is not None:  # first, because another thread may be in `served`
                self.buckets.compiled.remove(bucket)
            del self.programs[bucket]


class Served:
    """The program that serves calls with given sizes, and their cost."""

    __slots__ = ("_account", "_buckets", "program")

    def __init__(self, program: Program, buckets: Buckets | None, account: Account | None) -> None:
        self.program = program
        self._buckets, self._account = buckets, account

    def count_call(self) -> bool:
        """Counts a call; returns False once a closer program is worth compiling."""
        if self._buckets is None or self._account is None:
            return True
        return not self._buckets.note(self._account)
