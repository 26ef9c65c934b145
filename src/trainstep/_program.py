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
Hit = Callable[[Sequence[Any]], Any]


class Program:
    """A compiled step for one signature."""

    __slots__ = ("build", "domain", "executable", "hits", "index", "watch")

    def __init__(
        self, index: int, executable: Executable, build: Build, watch: Watch, domain: Domain
    ) -> None:
        self.index = index  # of its trace, in the ledger
        self.executable = executable
        self.build = build
        self.domain = domain
        self.watch = watch
        self.hits: dict[Any, Hit] = {}  # short ways to it, by the types of the arguments

    def __call__(self, leaves: Sequence[Any]) -> Any:
        while True:
            domain = self.domain
            with domain.lock:
                if domain.parent is None:
                    outputs = self.executable(leaves)
                    break
            self.domain = domain.root()  # merged since; its lock no longer protects anything
        return self.build.of(outputs)


MISS: Any = object()  # what the short way to a program says of a call that is not for it


def no_hit(args: Sequence[Any]) -> Any:
    """The short way when there is none."""
    return MISS


class Programs:
    """The programs of one function."""

    def __init__(self) -> None:
        self._by_key: dict[Key, list[Program]] = {}
        self._objects: dict[int, tuple[Any, set[Key]]] = {}
        self.hit: Hit = no_hit  # the short way to the last one found

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
        self.hit = no_hit

    def replace(self, index: int, executable: Executable) -> None:
        """Gives the program of trace `index` another executable for the same step."""
        for programs in self._by_key.values():
            for program in programs:
                if program.index == index:
                    program.executable = executable
                    program.hits.clear()
        self.hit = no_hit

    def watches(self) -> Sequence[Watch]:
        """The flags that matter to the programs there are."""
        return [p.watch for programs in self._by_key.values() for p in programs]

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))
