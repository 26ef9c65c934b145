"""Programs, and the cache that finds them.

A call arrives as the key of its arguments. The cache returns the program that was compiled for
that key and for the trainable flags as they are now. Nothing here knows the engine.

Objects among the arguments are held weakly: when one dies, the programs compiled for it go.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from trainstep._domain import Domain
from trainstep._engines import Executable
from trainstep._outputs import Build
from trainstep._watch import Watch

Key = tuple[Any, ...]


class Program:
    """A compiled step for one signature."""

    __slots__ = ("build", "domain", "executable", "index", "watch")

    def __init__(
        self, index: int, executable: Executable, build: Build, watch: Watch, domain: Domain
    ) -> None:
        self.index = index  # of its trace, in the ledger
        self.executable = executable
        self.build = build
        self.domain = domain
        self.watch = watch

    def __call__(self, leaves: Sequence[Any]) -> Any:
        while True:
            domain = self.domain
            with domain.lock:
                if domain.parent is None:
                    outputs = self.executable(leaves)
                    break
            self.domain = domain.root()  # merged since; its lock no longer protects anything
        return self.build(outputs)


MISS: Any = object()


def again(program: Program, arrays: Sequence[Any]) -> Callable[[Sequence[Any]], Any]:
    """A short way to `program` for calls like the last one, which was these arrays and no more.

    A loop makes the same call over and over. Comparing it with the last one costs a third of
    making its key and looking that up. Anything else is a `MISS`, and goes the long way.
    """
    kinds = [(type(x), x.shape, x.dtype) for x in arrays]
    holds, build = program.watch.holds, program.build

    def call(args: Sequence[Any]) -> Any:
        if len(args) != len(kinds):
            return MISS
        for x, (kind, shape, dtype) in zip(args, kinds, strict=False):
            if type(x) is not kind or x.shape != shape or x.dtype is not dtype:
                return MISS
        domain = program.domain
        with domain.lock:
            # A domain that was merged into another protects nothing: the long way finds the other.
            if domain.parent is not None or not holds():
                return MISS
            outputs = program.executable(args)
        return build(outputs)

    return call


class Programs:
    """The programs of one function."""

    def __init__(self) -> None:
        self._by_key: dict[Key, list[Program]] = {}
        self._objects: dict[int, tuple[Any, set[Key]]] = {}

    def find(self, key: Key) -> Program | None:
        """The program for this call, if there is one."""
        for program in self._by_key.get(key, ()):
            if program.watch.holds():
                return program
        return None

    def add(self, key: Key, program: Program, objects: Iterable[Any]) -> None:
        """Keeps a program for as long as the objects that it was compiled for live."""
        self._by_key[key] = [*self._by_key.get(key, ()), program]
        for each in objects:
            for owner in (
                (each.__self__, each.__func__) if isinstance(each, types.MethodType) else (each,)
            ):
                self._keep_with(owner, key)

    def _keep_with(self, owner: Any, key: Key) -> None:
        entry = self._objects.get(id(owner))
        if entry is None:
            number, cache = id(owner), weakref.ref(self)

            def drop(_: Any) -> None:
                programs = cache()
                if programs is not None:
                    programs._drop(number)

            try:
                ref: Any = weakref.ref(owner, drop)
            except TypeError:  # it cannot be held weakly; held, its id is not given to another
                ref = owner
            entry = self._objects[number] = (ref, set())
        entry[1].add(key)

    def _drop(self, number: int) -> None:
        for key in self._objects.pop(number)[1]:
            self._by_key.pop(key, None)

    def replace(self, index: int, executable: Executable) -> None:
        """Gives the program of trace `index` another executable for the same step."""
        for programs in self._by_key.values():
            for program in programs:
                if program.index == index:
                    program.executable = executable

    def watches(self) -> Sequence[Watch]:
        """The flags that matter to the programs there are."""
        return [p.watch for programs in self._by_key.values() for p in programs]

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))
