"""Programs, and the cache that finds them.

A call arrives as the key of its arguments: what they are, and their shapes. The cache returns the
program for that key and for the trainable flags as they are now: one compiled for these shapes, or
one of a family that serves sizes that vary. Nothing here knows the engine.

Objects among the arguments are held weakly: when one dies, the programs compiled for it go. So
does, past a bound, the program that was used longest ago.
"""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from trainstep._engines import Executable
from trainstep._function.arguments import Key
from trainstep._function.validity import Watch
from trainstep._state.locks import Domain
from trainstep._state.outputs import Build

if TYPE_CHECKING:
    from trainstep._function.sizes.family import Family, Served

Hit = Callable[[Sequence[Any], Any], Any]
Loop = Callable[[Iterator[Any], tuple[Any, ...], Any, Mapping[str, Any], str], tuple[int, Any]]
_clock = itertools.count()
_REMEMBERED = 4096  # shapes whose way to a program is kept


class Program:
    """A compiled step for one signature, or for one bucket of sizes."""

    __slots__ = (
        "build",
        "domain",
        "executable",
        "family",
        "has_run",
        "hits",
        "index",
        "used",
        "watch",
    )

    def __init__(
        self,
        index: int,
        executable: Executable,
        build: Build,
        watch: Watch,
        domain: Domain,
        *,
        family: Family | None = None,
    ) -> None:
        self.index = index  # of its entry in the ledger
        self.executable = executable
        self.build = build
        self.domain = domain
        self.watch = watch
        self.family = family
        self.has_run = False
        self.used = next(_clock)  # a run of calls like the last one counts as one use
        self.hits: dict[Any, Ways] = {}  # short ways to it, by the types of the arguments

    def __call__(self, leaves: Sequence[Any]) -> Any:
        while True:
            domain = self.domain
            with domain.lock:
                if domain.parent is None:
                    outputs = self.executable(leaves)
                    break
            self.domain = domain.root()  # merged since; its lock no longer protects anything
        return self.build.of(outputs)

    def fits(self) -> bool:
        """Whether its variables still are where it was compiled for."""
        if self.domain.parent is None:
            return True
        fits = getattr(self.executable, "fits", None)
        return fits is None or bool(fits())


MISS: Any = object()  # what the short way to a program says of a call that is not for it


def no_hit(args: Sequence[Any], cells: Any) -> Any:
    """The short way when there is none."""
    return MISS


def no_loop(
    batches: Iterator[Any], last: tuple[Any, ...], cells: Any, flags: Mapping[str, Any], stop: str
) -> tuple[int, Any]:
    """The loop over batches when there is none: the first of them is not for it."""
    return 0, next(batches, None)


class Ways(NamedTuple):
    """The short way to a program, and that of a loop over batches whose results nobody reads.

    A loop gives the number of batches that it has run, and the one that is not for the program;
    None if it came to the end, or `flags[stop]` was set.
    """

    hit: Hit = no_hit
    loop: Loop = no_loop


class Programs:
    """The programs of one function.

    Attributes:
        families: Steps that were recorded for sizes that vary, by what else a call is.
        hit: The short way to the last program found, or to one of several by shapes.
        loop: The same for one batch after the other.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._by_key: dict[Key, list[Program]] = {}
        self._served: dict[Key, Served] = {}
        self._objects: dict[int, tuple[Any, set[Key]]] = {}
        self._ways: dict[Any, tuple[Hit, Program, Served | None]] = {}
        self.families: dict[tuple[Any, ...], list[Family]] = {}
        # Kept, since objects also die when the process ends, and names of a module are gone then.
        self._no_ways = Ways()
        self.hit, self.loop = self._no_ways

    def find(self, key: Key, cells: Any) -> Program | None:
        """The program for this call of a function with this closure, if there is one."""
        for program in list(self._by_key.get(key, ())):
            if not program.fits():
                self._drop_programs([program])
            elif program.watch.holds(cells):
                program.used = next(_clock)
                return program
        served = self._served.get(key)
        if served is not None and not served.program.fits():
            self._drop_programs([served.program])
        elif served is not None and served.program.watch.holds(cells) and served.goes_on():
            served.program.used = next(_clock)
            return served.program
        return None

    def shorten(self, key: Key, args: Sequence[Any], ways: Ways, program: Program) -> None:
        """Remembers the short ways to a program for calls like this one."""
        if not self.families and program.family is None:
            self.hit, self.loop = ways
            return
        if len(self._ways) >= _REMEMBERED:
            self._ways.clear()
        self._ways[_shapes(args)] = (ways.hit, program, self._served.get(key))
        self.hit, self.loop = Ways(self._by_shapes)

    def _by_shapes(self, args: Sequence[Any], cells: Any) -> Any:
        """The short way when sizes vary: looked up by the shapes of the arguments."""
        shapes = _shapes(args)
        way = self._ways.get(shapes)
        if way is None:
            return MISS
        short, program, served = way
        result = short(args, cells)
        if result is not MISS:
            program.used = next(_clock)
            if served is not None and not served.goes_on():
                self._ways.pop(shapes, None)  # the next call of these shapes may compile
        return result

    def serve(self, key: Key, served: Served) -> None:
        """Lets a program of a family serve calls of this key."""
        if len(self._served) >= _REMEMBERED:
            self._served.clear()
        self._served[key] = served

    def add(self, key: Key, program: Program, objects: Iterable[Any]) -> list[Program]:
        """Keeps a program for as long as the objects that it was compiled for live.

        Returns:
            The programs that went for it.
        """
        self._by_key[key] = [*self._by_key.get(key, ()), program]
        self._keep(key, objects)
        return self._evicted(program)

    def add_family(self, key: Key, family: Family, objects: Iterable[Any]) -> None:
        """Keeps a step that was recorded for sizes that vary."""
        self.families.setdefault(key[0], []).append(family)
        self._keep(key, objects)
        self.forget_ways()

    def drop_family(self, key: Key, family: Family) -> None:
        """Forgets a record, which turned out to serve nothing."""
        self.families[key[0]].remove(family)
        self._served.clear()
        self.forget_ways()

    def added_bucket(self, program: Program) -> list[Program]:
        """Notes a new program of a family; returns those that went for it."""
        self._served.clear()
        self.forget_ways()
        return self._evicted(program)

    def forget_ways(self) -> None:
        """Forgets the short ways: programs have come or gone."""
        self._ways.clear()
        self.hit, self.loop = self._no_ways

    def all(self) -> list[Program]:
        """Every program there is."""
        # Copies: another thread may be adding one.
        exact = [program for programs in list(self._by_key.values()) for program in programs]
        families = [family for found in list(self.families.values()) for family in found]
        return [*exact, *(p for family in families for p in list(family.programs.values()))]

    def _evicted(self, new: Program) -> list[Program]:
        """Drops what was used longest ago, past the bound."""
        programs = sorted(self.all(), key=lambda program: program.used)
        gone = [p for p in programs if p is not new][: max(len(programs) - self._bound, 0)]
        self._drop_programs(gone)
        return gone

    def drop(self, program: Program) -> None:
        """Forgets a program, which does not fit any more."""
        self._drop_programs([program])

    def _drop_programs(self, gone: Sequence[Program]) -> None:
        for program in gone:
            if program.family is not None:
                program.family.drop(program)
                self._served.clear()
            for key in [k for k, kept in self._by_key.items() if program in kept]:
                self._by_key[key].remove(program)
                if not self._by_key[key]:
                    del self._by_key[key]
        if gone:
            self.forget_ways()

    def _keep(self, key: Key, objects: Iterable[Any]) -> None:
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
            self.families.pop(key[0], None)
        self._served.clear()
        self.forget_ways()

    def replace(self, index: int, executable: Executable) -> None:
        """Gives the program of entry `index` another executable for the same step."""
        for program in self.all():
            if program.index == index:
                program.executable = executable
                program.hits.clear()
        self.forget_ways()

    def padding(self) -> float:
        """How much of what was computed for sizes that vary was padding."""
        found = [f.buckets for families in list(self.families.values()) for f in families]
        rows = sum(b.rows for b in found if b is not None)
        padded = sum(b.padded for b in found if b is not None)
        return 1 - rows / padded if padded else 0.0

    def watches(self) -> Sequence[Watch]:
        """The flags that matter to the programs there are."""
        families = [family.watch for found in self.families.values() for family in found]
        return [*(p.watch for programs in self._by_key.values() for p in programs), *families]

    def __len__(self) -> int:
        return len(self.all())


_SHAPE, _NONE = (
    itertools.repeat("shape"),
    itertools.repeat(None),
)  # without end, so they serve every call


def _shapes(args: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(map(getattr, args, _SHAPE, _NONE))
