"""Dynamic sizes: finds the record that serves a call, and compiles programs of it.

    key --a family's pattern fits--> bucket --compiled--> program
                                            --not yet---> compiled now; or a larger one serves while
                                                          the closer one compiles in the background
        --none fits--> an earlier call --common pattern--> one trace for all sizes: a family
                                       --none-----------> a program for these shapes only

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
from trainstep._function.sizes.policy import DynamicAxes, Shapes

_BASES = 16  # the number of earlier shapes that a new call is compared with
_KINDS = 256  # the number of kinds of calls whose shapes are stored


@dataclass(frozen=True)
class Call:
    """A call that missed the cache.

    Attributes:
        labels: The names of its arrays and numbers, in order.
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
        axes: DynamicAxes,
        programs: Programs,
        ledger: Ledger,
        cells: Any,
    ) -> None:
        self._name, self._engine, self._axes = settings.name, settings.engine, axes
        self._shapes = _shapes_for(settings)
        self._programs, self._ledger, self._cells = programs, ledger, cells
        # All by skeleton, the first part of a key: the shapes and patterns of earlier traces; the
        # patterns that cannot be recorded, with the reasons; and those expected to be dynamic.
        self._bases: dict[Any, list[Sequence[Sequence[int | str]]]] = {}
        self._refused: dict[Any, dict[Pattern, str]] = {}
        self._expected: set[Any] = set()
        self._unreported: list[tuple[Any, Pattern]] = []
        # With one trace allowed, declared dynamic sizes have to be recorded in the first.
        self._one_trace = settings.max_traces == 1
        # The processes of a job may get different sizes but have to compile the same program, so
        # the first call is recorded for all sizes, if possible.
        separate = self._engine.size_one_is_separate
        self._at_once = settings.max_traces is None and separate and settings.is_shared
        self._enabled = self._engine.sizes != "exact" and self._shapes.policy != "exact"

    # Existing families -----------------------------------------------------------------------

    def find(self, key: Key) -> Program | None:
        """Returns the program of a family for this call, if one is compiled and close enough."""
        family, sizes = self._match(key)
        if family is None or family.traced.violated_assumption(sizes):
            return None
        served = family.served(sizes)
        while served is not None and not served.program.fits():
            self._programs.drop(served.program)
            served = family.served(sizes)
        if served is None or not served.count_call():
            return None
        self._programs.serve(key, served)
        return served.program

    def find_or_compile(self, call: Call) -> Program | None:
        """Returns the program of a family for this call, and compiles it if necessary."""
        family, sizes = self._match(call.key)
        if family is None or family.traced.violated_assumption(sizes):
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
        """Returns the fitting family with the fewest dynamic sizes, and the sizes of the call."""
        families = self._programs.families.get(key[0], ())
        for family in sorted(families, key=lambda family: len(family.names)):
            sizes = family.pattern.sizes(key[1])
            # No engine serves an empty array from a record with dynamic sizes.
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
            got = ", ".join(f"{name}={size}" for name, size in sizes.items())
            self._add(family, buckets.needed(wanted), f"no program for {got}", site)
        elif buckets.compiling is None and not buckets.is_full():
            cell = buckets.cell(wanted)
            if cell not in family.programs:
                self._add_closer(family, buckets, cell, site)

    def _add_closer(self, family: Family, buckets: Buckets, cell: Bucket, site: str) -> None:
        """Compiles a bucket with less padding, in the background unless that is off."""
        patience = self._shapes.patience
        why = f"padding in the larger program has cost as much as {patience} steps"
        if not self._shapes.background:
            self._add(family, cell, why, site)
            return
        # If compilation fails, this stays set, so that the larger program serves from then on.
        buckets.compiling = cell

        def work() -> None:
            self._add(family, cell, why, site)
            buckets.compiling = None

        background.start(work)

    def warm_up(self, call: Call) -> None:
        """Compiles every bucket of the family of a call, up to the sizes of the call."""
        family, sizes = self._match(call.key)
        if family is None or family.buckets is None:
            return
        for bucket in family.buckets.up_to(sizes):
            if bucket not in family.programs:
                self._add(family, bucket, "compiled by `warm_up`", call.site)

    def _add(self, family: Family, bucket: Bucket, why: str, site: str) -> None:
        """Compiles a bucket and records it in the ledger."""
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
            advice="dynamic sizes share a few programs; `warm_up` compiles them ahead of time",
        )
        program.index = self._ledger.record(event)
        if family.buckets is not None and family.buckets.is_full():  # one has to be dropped
            oldest = min(list(family.programs.values()), key=lambda p: p.used)
            family.drop(oldest)
            self.record_evicted([oldest], site)
        family.keep(bucket, program)
        self.record_evicted(self._programs.added_bucket(program), site)

    def record_evicted(self, programs: Sequence[Program], site: str) -> None:
        """Records dropped programs in the ledger."""
        for program in programs:
            event = TraceEvent(
                index=0,
                function=self._name,
                signature=self._ledger[program.index - 1].signature,
                changes=("the cache is full, and this program was the least recently used",),
                nearest=program.index,
                site=site,
                kind="evicted",
                advice="if it is needed again, increase `max_programs` or `buckets` of `Shapes`",
            )
            self._ledger.record(event)

    # New families ----------------------------------------------------------------------------

    def pattern(self, call: Call) -> tuple[Pattern, dict[str, int]] | None:
        """Returns the pattern to record and its first sizes; None: record these shapes only."""
        skeleton, shapes = call.key
        if not self._enabled or 0 in (size for shape in shapes for size in shape):
            return None
        declared = self._declared(call)
        bases = [b for b in self._bases.get(skeleton, ()) if tuple(b) != shapes]
        at_once = self._at_once or self._shapes.policy != "auto" or skeleton in self._expected
        if at_once or (self._one_trace and any(declared)):
            bases = [shapes, *bases]  # the call itself serves if there is no other
        for base in reversed(bases):
            found = common(base, shapes, declared)
            if found is None or found in self._refused.get(skeleton, {}):
                continue
            family, _ = self._match(call.key)
            if family is not None and family.pattern == found:
                continue  # the sizes violate its assumptions; the same record again would not help
            first = found.sizes(base) if all(map(_known, base)) else None  # type: ignore[arg-type]
            return found, first or found.sizes(shapes) or {}
        return None

    def check(self, call: Call) -> None:
        """Raises an `ArgumentError` if an array lacks an axis that was declared as dynamic."""
        for label, shape in zip(call.labels, call.key[1], strict=True):
            self._axes.check(self._name, label, shape)

    def _declared(self, call: Call) -> list[dict[int, str | None]]:
        """Returns the axes that were declared as dynamic, by array."""
        arrays = zip(call.labels, call.key[1], strict=True)
        return [self._axes.of(label, len(shape)) for label, shape in arrays]

    def sizes(self, call: Call) -> dict[str, int]:
        """Returns the dynamic sizes of a call, by name."""
        shapes = call.key[1]
        found = common(shapes, shapes, self._declared(call))
        return (found.sizes(shapes) if found is not None else None) or {}

    def expect(self, call: Call) -> None:
        """Treats the sizes of calls like this one as dynamic from the first trace on."""
        self._expected.add(call.key[0])

    def remember(self, call: Call, shapes: Sequence[Sequence[int | str]]) -> None:
        """Stores the shapes, or the pattern, that a call was traced for."""
        bases = self._bases.setdefault(call.key[0], [])
        bases.append(shapes)
        del bases[:-_BASES]
        if len(self._bases) > _KINDS:  # the objects of old calls may be freed by now
            del self._bases[next(iter(self._bases))]

    def buckets(self, pattern: Pattern, first: Mapping[str, int]) -> Buckets | None:
        """Returns the buckets of a new family; None if one program serves all sizes."""
        if self._engine.sizes != "bucket":
            return None
        return Buckets(pattern.names, first, self._shapes)

    # Refusals --------------------------------------------------------------------------------

    def refuse(self, call: Call, pattern: Pattern, refusal: Refused) -> None:
        """Stores the reason why a call cannot be recorded with dynamic sizes."""
        where = user_code.of_error(refusal, refusal.frames)
        cause = f"{refusal} ({where})" if where else str(refusal)
        self._refused.setdefault(call.key[0], {})[pattern] = cause
        self._unreported.append((call.key[0], pattern))

    def withdraw_refusals(self, call: Call) -> None:
        """Drops refusals after the exact trace failed, too: the sizes are not the cause."""
        for skeleton, pattern in [each for each in self._unreported if each[0] == call.key[0]]:
            del self._refused[skeleton][pattern]
            self._unreported.remove((skeleton, pattern))

    def report_refusals(self, site: str) -> None:
        """Warns once of each refusal, after the step was compiled for its exact shapes.

        A refusal of the first call is reported only when there is a second size.
        """
        reported = [each for each in self._unreported if self._has_many_sizes(each[0])]
        for skeleton, pattern in reported:
            what = f"cannot be recorded with dynamic sizes: {self._refused[skeleton][pattern]}"
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
        self._unreported = [each for each in self._unreported if each not in reported]

    def _has_many_sizes(self, skeleton: Any, *shapes: Any) -> bool:
        """Whether calls of a kind, with these shapes, have or are expected to have many sizes."""
        if not self._at_once or self._shapes.policy != "auto" or skeleton in self._expected:
            return True
        return len({*map(tuple, self._bases.get(skeleton, ())), *shapes}) > 1

    def advice(self, pattern: Pattern | None, why_exact: str) -> str:
        """Returns advice for a trace that is caused by sizes; "" for another one."""
        if pattern is not None:
            return "nothing: this trace serves all sizes, and its programs are compiled from it"
        if why_exact:
            return _CURE
        if self._shapes.policy == "exact" and self._engine.sizes != "exact":
            return "shapes='exact' compiles a program for every shape; 'auto' shares programs"
        return ""

    def why_exact(self, call: Call) -> str:
        """Returns the reason why a call with dynamic sizes needs an exact program; "" if none."""
        family, sizes = self._match(call.key)
        violated = "" if family is None else family.traced.violated_assumption(sizes)
        if family is None or not violated:
            if not self._has_many_sizes(*call.key):
                return ""
            cause = next(reversed(self._refused.get(call.key[0], {}).values()), "")
            return cause and f"every size needs its own program: {cause}"
        # A text that ends with a parenthesis has a line of the user's code, which can be changed.
        if violated.endswith(")") and violated not in family.warned:
            family.warned.add(violated)
            self._warn(f"branches on a size: {violated}", _CURE)
        return f"the program for dynamic sizes needs {violated}"

    def _warn(self, what: str, cure: str) -> None:
        warnings.warn(
            f"`{self._name}` {what}.\n"
            "  so:       such calls are compiled for their exact shapes, one program per shape\n"
            f"  to fix:   {cure}",
            SizesWarning,
            stacklevel=user_code.depth(),
        )


def _shapes_for(settings: StepSettings) -> Shapes:
    if settings.options.repeat:
        return replace(settings.shapes, policy="exact")
    if settings.is_shared:
        # The choice of a program must not depend on time: all processes have to choose the same.
        return replace(settings.shapes, background=False)
    return settings.shapes


_CURE = "make the step independent of the size, or pass shapes='exact' if this is intended"


def _text(family: Family, bucket: Bucket) -> str:
    sizes = zip(family.names, bucket, strict=False)
    return ", ".join(f"{name} up to {size}" for name, size in sizes) or str(family.pattern)


def _known(shape: Sequence[int | str]) -> bool:
    return all(isinstance(size, int) for size in shape)
