"""Sizes that vary: which record of a step serves a call, and what of it is compiled when.

    key --a family's pattern fits--> bucket --compiled--> program
                                            --not yet---> compiled now; or a larger one serves,
                                                          and the closer is compiled behind
        --none fits--> an earlier call --common pattern--> one trace for all sizes: a family
                                       --none-----------> a program for these shapes alone

A family is one record of the step with its programs. Nothing here runs the user's Python.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainstep._common import user_code
from trainstep._common.errors import SizesWarning
from trainstep._engines import Refused
from trainstep._explain.ledger import Ledger, TraceEvent
from trainstep._explain.signature import Part
from trainstep._function.arguments import Key
from trainstep._function.program_cache import Program, Programs
from trainstep._function.settings import StepSettings
from trainstep._function.sizes import background
from trainstep._function.sizes.buckets import Bucket, Buckets
from trainstep._function.sizes.family import Family
from trainstep._function.sizes.pattern import Pattern, common
from trainstep._function.sizes.policy import Shapes, Varying

_BASES = 16  # earlier shapes that a new call is compared with
_KINDS = 256  # kinds of calls whose shapes are kept


@dataclass(frozen=True)
class Call:
    """A call that no program was found for.

    Attributes:
        labels: The names of its arrays, numbers included, in order.
    """

    values: Sequence[Any]
    key: Key
    leaves: Sequence[Any]
    parts: Sequence[Part]
    site: str

    @property
    def labels(self) -> list[str]:
        return [part.label for part in self.parts if part.kind in ("array", "number")]


class DynamicSizes:
    """The families of one function."""

    def __init__(
        self,
        settings: StepSettings,
        varying: Varying,
        programs: Programs,
        ledger: Ledger,
        cells: Any,
    ) -> None:
        self._name, self._engine, self._varying = settings.name, settings.engine, varying
        self._shapes = _shapes_for(settings)
        self._programs, self._ledger, self._cells = programs, ledger, cells
        # Shapes and patterns of the calls before, and what could not be recorded, by skeleton.
        self._bases: dict[Any, list[Sequence[Sequence[int | str]]]] = {}
        self._refused: dict[Any, dict[Pattern, str]] = {}
        self._expected: set[Any] = set()
        self._untold: list[tuple[Any, Pattern]] = []
        # There may be no second trace for sizes that are known to be dynamic.
        self._one_trace = settings.max_traces == 1
        # The first call is recorded for all sizes, if it can be: the processes of a job may get
        # different sizes, and have to compile the same.
        separate = self._engine.size_one_is_separate
        self._ahead = settings.max_traces is None and separate and settings.is_shared
        self._on = self._engine.sizes != "exact" and self._shapes.policy != "exact"

    # Families that there are -----------------------------------------------------------------

    def find(self, key: Key) -> Program | None:
        """The program of a family that serves this call, if it is compiled and close enough."""
        family, sizes = self._match(key)
        if family is None or family.traced.broken(sizes):
            return None
        served = family.served(sizes)
        while served is not None and not served.program.fits():
            self._programs.drop(served.program)
            served = family.served(sizes)
        if served is None or not served.goes_on():
            return None
        self._programs.serve(key, served)
        return served.program

    def compiled(self, call: Call) -> Program | None:
        """The program of a family that serves this call, compiled for it if need be."""
        family, sizes = self._match(call.key)
        if family is None or family.traced.broken(sizes):
            return None
        try:
            self._compile_for(family, sizes, call.site)
        except Refused as refusal:
            self._programs.drop_family(call.key, family)
            self.refuse(call, family.pattern, refusal)
            return None
        served = family.served(sizes)
        assert served is not None
        self._programs.serve(call.key, served)
        return served.program

    def _match(self, key: Key) -> tuple[Family | None, dict[str, int]]:
        """The family whose pattern fits, the narrowest first, and the sizes of this call."""
        families = self._programs.families.get(key[0], ())
        for family in sorted(families, key=lambda family: len(family.names)):
            sizes = family.pattern.sizes(key[1])
            # An empty array is a case of its own everywhere.
            if sizes is not None and min(sizes.values()) > 0 and family.watch.holds(self._cells):
                return family, sizes
        return None, {}

    # Programs of a family --------------------------------------------------------------------

    def _compile_for(self, family: Family, sizes: Mapping[str, int], site: str) -> None:
        wanted, buckets = family.ordered(sizes), family.buckets
        if buckets is None:
            if not family.programs:
                self._add(family, (), f"the program of trace {family.index}", site)
        elif buckets.serving(wanted) is None:
            came = ", ".join(f"{name}={size}" for name, size in sizes.items())
            self._add(family, buckets.needed(wanted), f"no program for {came}", site)
        elif buckets.awaited is None and not buckets.full():
            cell = buckets.cell(wanted)
            if cell not in family.programs:
                self._add_closer(family, buckets, cell, site)

    def _add_closer(self, family: Family, buckets: Buckets, cell: Bucket, site: str) -> None:
        """Compiles a bucket that wastes less, behind if that is wanted."""
        patience = self._shapes.patience
        why = f"the larger program has wasted as much as {patience} steps cost"
        if not self._shapes.background:
            self._add(family, cell, why, site)
            return
        buckets.awaited = cell  # if it fails it stays awaited, and the larger one serves for good

        def work() -> None:
            self._add(family, cell, why, site)
            buckets.awaited = None

        background.start(work)

    def warm_up(self, call: Call) -> None:
        """Compiles every bucket of the family of a call, up to the sizes of this one."""
        family, sizes = self._match(call.key)
        if family is None or family.buckets is None:
            return
        for bucket in family.buckets.up_to(sizes):
            if bucket not in family.programs:
                self._add(family, bucket, "compiled ahead", call.site)

    def _add(self, family: Family, bucket: Bucket, why: str, site: str) -> None:
        """Compiles a bucket and enters it in the ledger."""
        hits, started = self._engine.disk_hits(), time.perf_counter()
        program = family.compile(bucket)
        event = TraceEvent(
            index=0,
            function=self._name,
            signature=_text(family, bucket),
            changes=(f"{why}: compiled for {_text(family, bucket)}",),
            nearest=family.index,
            site=site,
            kind="bucket",
            compiler=family.compiler,
            compile_seconds=time.perf_counter() - started,
            from_disk=self._engine.disk_hits() > hits,
            advice="sizes that vary share a few programs; `warm_up` compiles them ahead",
        )
        program.index = self._ledger.record(event)
        if family.buckets is not None and family.buckets.full():  # it has to make room
            oldest = min(list(family.programs.values()), key=lambda p: p.used)
            family.drop(oldest)
            self.tell_evicted([oldest], site)
        family.keep(bucket, program)
        self.tell_evicted(self._programs.added_bucket(program), site)

    def tell_evicted(self, programs: Sequence[Program], site: str) -> None:
        """Enters programs that were dropped in the ledger."""
        for program in programs:
            event = TraceEvent(
                index=0,
                function=self._name,
                signature=self._ledger[program.index - 1].signature,
                changes=("more programs than the bound, and this one was used longest ago",),
                nearest=program.index,
                site=site,
                kind="evicted",
                advice="if it is needed again, raise `max_programs` or `buckets` of `Shapes`",
            )
            self._ledger.record(event)

    # New families ----------------------------------------------------------------------------

    def pattern(self, call: Call) -> tuple[Pattern, dict[str, int]] | None:
        """What to record a call for, and the sizes that came first; None: these shapes alone."""
        skeleton, shapes = call.key
        if not self._on or 0 in (size for shape in shapes for size in shape):
            return None
        declared = self._declared(call)
        bases = [b for b in self._bases.get(skeleton, ()) if tuple(b) != shapes]
        at_once = self._ahead or self._shapes.policy != "auto" or skeleton in self._expected
        if at_once or (self._one_trace and any(declared)):
            bases = [shapes, *bases]  # by this call alone if there is no other
        for base in reversed(bases):
            found = common(base, shapes, declared)
            if found is None or found in self._refused.get(skeleton, {}):
                continue
            family, _ = self._match(call.key)
            if family is not None and family.pattern == found:
                continue  # it does not serve this call, and would not if it were made again
            first = found.sizes(base) if all(map(_known, base)) else None  # type: ignore[arg-type]
            return found, first or found.sizes(shapes) or {}
        return None

    def check(self, call: Call) -> None:
        """Refuses axes that were declared and are not there."""
        for label, shape in zip(call.labels, call.key[1], strict=True):
            self._varying.check(self._name, label, shape)

    def _declared(self, call: Call) -> list[dict[int, str | None]]:
        """By array, the axes that were declared as varying."""
        arrays = zip(call.labels, call.key[1], strict=True)
        return [self._varying.of(label, len(shape)) for label, shape in arrays]

    def sizes(self, call: Call) -> dict[str, int]:
        """The sizes of a call that may vary, by name."""
        shapes = call.key[1]
        found = common(shapes, shapes, self._declared(call))
        return (found.sizes(shapes) if found is not None else None) or {}

    def expect(self, call: Call) -> None:
        """Takes it that the sizes of calls like this one will vary."""
        self._expected.add(call.key[0])

    def remember(self, call: Call, shapes: Sequence[Sequence[int | str]]) -> None:
        """Notes the shapes, or the pattern, that a call was traced for."""
        bases = self._bases.setdefault(call.key[0], [])
        bases.append(shapes)
        del bases[:-_BASES]
        if len(self._bases) > _KINDS:  # objects that calls were made with may be long gone
            del self._bases[next(iter(self._bases))]

    def buckets(self, pattern: Pattern, first: Mapping[str, int]) -> Buckets | None:
        """The buckets of a new family; None if the engine takes all sizes in one program."""
        if self._engine.sizes != "bucket":
            return None
        return Buckets(pattern.names, first, self._shapes)

    # What stands against it ------------------------------------------------------------------

    def refuse(self, call: Call, pattern: Pattern, refusal: Refused) -> None:
        """Notes that a call cannot be recorded for sizes that vary."""
        where = user_code.of_error(refusal, refusal.frames)
        cause = f"{refusal} ({where})" if where else str(refusal)
        self._refused.setdefault(call.key[0], {})[pattern] = cause
        self._untold.append((call.key[0], pattern))

    def take_back(self, call: Call) -> None:
        """Forgets refusals: the same goes wrong at the exact shapes, so sizes are not the cause."""
        for skeleton, pattern in [each for each in self._untold if each[0] == call.key[0]]:
            del self._refused[skeleton][pattern]
            self._untold.remove((skeleton, pattern))

    def tell_refusals(self, site: str) -> None:
        """Says, once, what could not be recorded, now that it runs at its exact shapes.

        What was tried ahead matters to nobody until there is a second size.
        """
        told = [each for each in self._untold if self._matters(each[0])]
        for skeleton, pattern in told:
            what = f"cannot be recorded for sizes that vary: {self._refused[skeleton][pattern]}"
            event = TraceEvent(
                index=0,
                function=self._name,
                signature=str(pattern),
                changes=(what,),
                nearest=None,
                site=site,
                kind="refused",
                advice=_CURE,
            )
            self._ledger.record(event)
            self._warn(what, _CURE)
        self._untold = [each for each in self._untold if each not in told]

    def _matters(self, skeleton: Any, *shapes: Any) -> bool:
        """Whether sizes of calls of a kind, these too, vary or were said to."""
        if not self._ahead or self._shapes.policy != "auto" or skeleton in self._expected:
            return True
        return len({*map(tuple, self._bases.get(skeleton, ())), *shapes}) > 1

    def advice(self, pattern: Pattern | None, against: str) -> str:
        """What to do about a trace, if sizes have to do with it; "" if not."""
        if pattern is not None:
            return "nothing: this trace serves all sizes; its programs follow"
        if against:
            return _CURE
        if self._shapes.policy == "exact" and self._engine.sizes != "exact":
            return "a program for every shape, as shapes='exact' says; 'auto' shares them"
        return ""

    def against(self, call: Call) -> str:
        """Why a call needs a program for its shapes alone, if sizes are known to vary."""
        family, sizes = self._match(call.key)
        broken = "" if family is None else family.traced.broken(sizes)
        if family is None or not broken:
            if not self._matters(*call.key):
                return ""
            cause = next(reversed(self._refused.get(call.key[0], {}).values()), "")
            return cause and f"a program for every size, because of: {cause}"
        if broken.endswith(")") and broken not in family.told:  # with a line of the user's
            family.told.add(broken)
            self._warn(f"takes another way for some sizes than for those with {broken}", _CURE)
        return f"the program for sizes that vary serves {broken}"

    def _warn(self, what: str, cure: str) -> None:
        warnings.warn(
            f"`{self._name}` {what}.\n"
            "  so:       such calls are compiled for their exact shapes, one program each\n"
            f"  to fix:   {cure}",
            SizesWarning,
            stacklevel=user_code.depth(),
        )


def _shapes_for(settings: StepSettings) -> Shapes:
    if settings.options.repeat:
        return replace(settings.shapes, policy="exact")
    if settings.is_shared:
        # The choice of a program must not depend on time: all processes have to make the same.
        return replace(settings.shapes, background=False)
    return settings.shapes


_CURE = "let the step do the same for every size, or pass shapes='exact' if that is meant"


def _text(family: Family, bucket: Bucket) -> str:
    sizes = zip(family.names, bucket, strict=False)
    return ", ".join(f"{name} up to {size}" for name, size in sizes) or str(family.pattern)


def _known(shape: Sequence[int | str]) -> bool:
    return all(isinstance(size, int) for size in shape)
