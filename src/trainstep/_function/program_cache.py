"""Programs, and the cache that finds them.

A call arrives as the key of its arguments. The cache returns the program for that key and for the
current flags and captured values: one compiled for these shapes, or one of a family with dynamic
sizes. Nothing here knows the engine.

    key --hit--> Program
        --miss--> None, and the compiler adds one

The cache references objects among the arguments weakly, and drops their programs when they are
freed. Beyond its bound it drops the least recently used program.
"""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from trainstep._engines import Executable
from trainstep._function.arguments import Key
from trainstep._function.validity import Watch
from trainstep._state.locks import Domain
from trainstep._state.outputs import Build

if TYPE_CHECKING:
    from trainstep._function.sizes.family import Family, Served

Hit = Callable[[Sequence[Any], Any], Any]
Loop = Callable[[Iterator[Any], tuple[Any, ...], Any, "StopFlag"], tuple[int, Any]]
_clock = itertools.count()
_REMEMBERED = 4096  # the largest number of shapes in each lookup table


class Program:
    """A compiled step for one signature, or for one bucket of sizes."""

    __slots__ = (
        "build",
        "domain",
        "executable",
        "family",
        "fast_paths",
        "has_run",
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
        self.index = index  # its ledger entry
        self.executable = executable
        self.build = build
        self.domain = domain
        self.watch = watch
        self.family = family
        self.has_run = False
        self.used = next(_clock)  # equal calls in a row count as one use
        self.fast_paths: dict[Any, FastPath] = {}  # by the types of the arguments

    def __call__(self, leaves: Sequence[Any]) -> Any:
        while True:
            domain = self.domain
            with domain.lock:
                if domain.parent is None:
                    outputs = self.executable(leaves)
                    break
            self.domain = domain.root()  # merged since: the old lock no longer protects anything
        return self.build.of(outputs)

    def fits(self) -> bool:
        """Whether its variables still have the placement that it was compiled for."""
        if self.domain.parent is None:
            return True
        fits = getattr(self.executable, "fits", None)
        return fits is None or bool(fits())


class StopFlag(Protocol):
    """A flag that a callback sets to end a loop: an entry in the attributes of an object."""

    @property
    def attributes(self) -> Mapping[str, Any]:
        """The attributes by name, as they are now."""
        ...

    @property
    def name(self) -> str:
        """The name of the flag."""
        ...

    def is_set(self) -> bool:
        """Whether the loop is to end."""
        ...


MISS: Any = object()  # the fast path's result for a call that its program does not serve


def no_hit(args: Sequence[Any], cells: Any) -> Any:
    """The fast path of a function without one: every call misses."""
    return MISS


def no_loop(
    batches: Iterator[Any], last: tuple[Any, ...], cells: Any, stop: StopFlag
) -> tuple[int, Any]:
    """The loop of a function without a fast path: the first batch misses."""
    return 0, next(batches, None)


class FastPath(NamedTuple):
    """The fast path to a program: for one call, and for a loop over batches without outputs.

    A loop returns the number of batches that it has run, and the batch that missed; None if there
    was none: the batches ended, or `stop` was set.
    """

    hit: Hit = no_hit
    loop: Loop = no_loop


class Programs:
    """The programs of one function.

    Attributes:
        families: Records with dynamic sizes, by the first part of a key.
        hit: The fast path to the last program found; with dynamic sizes, one that looks the program
            up by shapes.
        loop: The same for a loop over batches.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._by_key: dict[Key, list[Program]] = {}
        self._served: dict[Key, Served] = {}
        self._objects: dict[int, tuple[Any, set[Key]]] = {}
        self._fast_paths: dict[Any, tuple[Hit, Program, Served | None]] = {}
        self.families: dict[tuple[Any, ...], list[Family]] = {}
        # Stored here because weakref callbacks also run at interpreter exit, when the names of this
        # module are gone.
        self._no_fast_path = FastPath()
        self.hit, self.loop = self._no_fast_path

    def find(self, key: Key, cells: Any) -> Program | None:
        """Returns the program for a call, given the function's closure cells; None on a miss."""
        for program in list(self._by_key.get(key, ())):
            if not program.fits():
                self._drop_programs([program])
            elif program.watch.holds(cells):
                program.used = next(_clock)
                return program
        served = self._served.get(key)
        if served is not None and not served.program.fits():
            self._drop_programs([served.program])
        elif served is not None and served.program.watch.holds(cells) and served.count_call():
            served.program.used = next(_clock)
            return served.program
        return None

    def set_fast_path(
        self, key: Key, args: Sequence[Any], path: FastPath, program: Program
    ) -> None:
        """Installs the fast path for calls like this one."""
        if not self.families and program.family is None:
            self.hit, self.loop = path
            return
        if len(self._fast_paths) >= _REMEMBERED:
            self._fast_paths.clear()
        self._fast_paths[_shapes(args)] = (path.hit, program, self._served.get(key))
        self.hit, self.loop = FastPath(self._hit_by_shapes)

    def _hit_by_shapes(self, args: Sequence[Any], cells: Any) -> Any:
        """The fast path with dynamic sizes: looks the program up by the shapes of the arguments."""
        shapes = _shapes(args)
        found = self._fast_paths.get(shapes)
        if found is None:
            return MISS
        hit, program, served = found
        result = hit(args, cells)
        if result is not MISS:
            program.used = next(_clock)
            if served is not None and not served.count_call():
                # The next call with these shapes misses, and compiles a closer program.
                self._fast_paths.pop(shapes, None)
        return result

    def serve(self, key: Key, served: Served) -> None:
        """Makes a program of a family serve calls with this key."""
        if len(self._served) >= _REMEMBERED:
            self._served.clear()
        self._served[key] = served

    def add(self, key: Key, program: Program, objects: Iterable[Any]) -> list[Program]:
        """Stores a program until an object that it was compiled for is freed.

        Returns:
            The programs that were evicted.
        """
        self._by_key[key] = [*self._by_key.get(key, ()), program]
        self._keep(key, objects)
        return self._evict(program)

    def add_family(self, key: Key, family: Family, objects: Iterable[Any]) -> None:
        """Stores a record with dynamic sizes."""
        self.families.setdefault(key[0], []).append(family)
        self._keep(key, objects)
        self.clear_fast_paths()

    def drop_family(self, key: Key, family: Family) -> None:
        """Drops a record that the engine cannot compile."""
        self.families[key[0]].remove(family)
        self._served.clear()
        self.clear_fast_paths()

    def added_bucket(self, program: Program) -> list[Program]:
        """Accounts for a new program of a family; returns the programs that were evicted."""
        self._served.clear()
        self.clear_fast_paths()
        return self._evict(program)

    def clear_fast_paths(self) -> None:
        """Drops all fast paths, after programs were added or dropped."""
        self._fast_paths.clear()
        self.hit, self.loop = self._no_fast_path

    def all(self) -> list[Program]:
        """Returns every program."""
        # Copies, because another thread may add one.
        exact = [program for programs in list(self._by_key.values()) for program in programs]
        families = [family for found in list(self.families.values()) for family in found]
        return [*exact, *(p for family in families for p in list(family.programs.values()))]

    def _evict(self, new: Program) -> list[Program]:
        """Drops the least recently used programs beyond the bound, and returns them."""
        programs = sorted(self.all(), key=lambda program: program.used)
        dropped = [p for p in programs if p is not new][: max(len(programs) - self._bound, 0)]
        self._drop_programs(dropped)
        return dropped

    def drop(self, program: Program) -> None:
        """Drops a program whose variables were moved."""
        self._drop_programs([program])

    def _drop_programs(self, dropped: Sequence[Program]) -> None:
        for program in dropped:
            if program.family is not None:
                program.family.drop(program)
                self._served.clear()
            for key in [k for k, kept in self._by_key.items() if program in kept]:
                self._by_key[key].remove(program)
                if not self._by_key[key]:
                    del self._by_key[key]
        if dropped:
            self.clear_fast_paths()

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
            except TypeError:  # no weak references: kept alive, so that its id is not reused
                ref = owner
            entry = self._objects[number] = (ref, set())
        entry[1].add(key)

    def _drop(self, number: int) -> None:
        for key in self._objects.pop(number)[1]:
            self._by_key.pop(key, None)
            self.families.pop(key[0], None)
        self._served.clear()
        self.clear_fast_paths()

    def replace(self, index: int, executable: Executable) -> None:
        """Replaces the executable of the program with ledger entry `index`."""
        for program in self.all():
            if program.index == index:
                program.executable = executable
                program.fast_paths.clear()
        self.clear_fast_paths()

    def padding(self) -> float:
        """Returns the share of computation spent on padding, in programs with dynamic sizes."""
        found = [f.buckets for families in list(self.families.values()) for f in families]
        rows = sum(b.rows for b in found if b is not None)
        padded = sum(b.padded for b in found if b is not None)
        return 1 - rows / padded if padded else 0.0

    def watches(self) -> Sequence[Watch]:
        """Returns the flags and captured values of all programs."""
        families = [family.watch for found in self.families.values() for family in found]
        return [*(p.watch for programs in self._by_key.values() for p in programs), *families]

    def __len__(self) -> int:
        return len(self.all())


# Infinite iterators, so that one pair serves every call: `map` makes the fastest loop.
_SHAPE, _NONE = itertools.repeat("shape"), itertools.repeat(None)


def _shapes(args: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(map(getattr, args, _SHAPE, _NONE))
