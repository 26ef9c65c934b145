"""`Function`: the path of one call, from Python values to a compiled step and back.

    values -> key and arrays -> program (hit) ---------------------> run, write back -> outputs
                             -> miss: limit, trace, compile, ledger -^

`Function._call` reads like this line; each stage is a file of its own. A call like the last one
takes the short way, where all stages of a hit are one function (`_hit`).
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Generic, ParamSpec, TypeVar

from trainstep._common.errors import SizesWarning
from trainstep._function.compiler import Compiler
from trainstep._function.declared_signature import check_largest, filled_with_zeros
from trainstep._function.fast_path import hit
from trainstep._function.policies import Policies
from trainstep._function.program_cache import MISS, Program
from trainstep._function.settings import StepSettings
from trainstep._function.sizes.policy import Shapes
from trainstep._function.verify import TOLERANCE, Verification, compared, probed
from trainstep._state.scopes import current_scope

P = ParamSpec("P")
R = TypeVar("R")


class Function(Generic[P, R]):
    """A step that is compiled once per signature. Made by `trainstep.function`.

    Attributes:
        ledger: Every trace of this function, and why it was made.
    """

    def __init__(self, fn: Callable[P, R], settings: StepSettings | None = None) -> None:
        functools.update_wrapper(self, fn, updated=())
        settings = settings or StepSettings()
        self.__name__: str = settings.name or _name_of(fn)
        self._fn, self._settings, self._engine = fn, settings, settings.engine
        self._compiler = Compiler(fn, replace(settings, name=self.__name__))
        # Runs in place of `fn` inside another step.
        self._inlined: Callable[P, R] = self._compiler.guard.around(settings.inlined or fn)
        self.ledger = self._compiler.ledger
        self._idle = self._engine.is_idle
        self._bind = self._compiler.parameters.bind
        self._flatten = self._compiler.flatten
        self._programs, self._cells = self._compiler.programs, self._compiler.cells

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = MISS if kwargs else self._programs.hit(args, self._cells)
        return self._call(args, kwargs) if result is MISS else result

    def _call(self, args: Any, kwargs: Any) -> R:
        # In a scope (a trace of ours, a differentiation, one of the user's) the step is part of it.
        if current_scope() is not None or (
            not self._idle() and self._engine.inlines(self.__name__)
        ):
            return self._inlined(*args, **kwargs)
        values = self._bind(args, kwargs)
        flat = self._flatten(values)
        _, key, leaves = flat
        program = self._programs.find(key, self._cells)
        if program is None:
            return self._first_run(self._compiler.program(flat), leaves)
        if values is args:
            ways = hit(program, args, leaves, self._compiler.arguments)
            self._programs.shorten(key, args, ways, program)
        result: R = program(leaves)
        return result

    def _first_run(self, program: Program, leaves: list[Any]) -> R:
        started = time.perf_counter()
        result: R = program(leaves)
        if self._engine.compiles_at_first_run and not program.has_run:
            program.has_run = True
            self.ledger.add_compile_seconds(program.index, time.perf_counter() - started)
        return result

    def shortcut(self, *last: Any) -> Callable[[Any], R]:
        """The function of a tuple of arguments before the last ones, in one Python frame less."""
        programs, call, cells = self._programs, self._call, self._cells

        def run(first: Any) -> R:
            args = first + last
            result: R = programs.hit(args, cells)
            return call(args, {}) if result is MISS else result

        return run

    def loop(self, *last: Any) -> Callable[[Iterable[Any], Mapping[str, Any], str], int]:
        """What calls the function with one tuple of arguments before the last ones after the other.

        What it returns is dropped. It ends with the tuples, or after a call that has set
        `flags[stop]`, and gives the number of calls.
        """
        programs, cells, run = self._programs, self._cells, self.shortcut(*last)

        def run_all(firsts: Iterable[Any], flags: Mapping[str, Any], stop: str) -> int:
            left, count = iter(firsts), 0
            while True:
                ran, other = programs.loop(left, last, cells, flags, stop)
                count += ran
                if other is None:
                    return count
                run(other)
                count += 1
                if flags.get(stop):
                    return count

        return run_all

    def laid_out(self, layout: Any) -> Function[P, R]:
        """The same function with another layout, traced anew; itself if it has that one."""
        options = self._settings.options
        if layout is options.layout:
            return self
        return Function(self._fn, replace(self._settings, options=replace(options, layout=layout)))

    @property
    def trace_count(self) -> int:
        """How often the function was traced."""
        return self.ledger.traces

    @property
    def program_count(self) -> int:
        """How many programs are kept."""
        return len(self._programs)

    def written(self) -> list[Any]:
        """The variables that its programs write."""
        return self._compiler.written()

    @property
    def padding(self) -> float:
        """The part of what was computed for sizes that vary that was padding."""
        return self._programs.padding()

    @property
    def skipped(self) -> int:
        """How many batches were skipped for their numbers; see `nan_policy`."""
        return self._compiler.guard.skipped()

    def warm_up(
        self, *args: Any, largest: int | Mapping[str, int] | None = None, **kwargs: Any
    ) -> None:
        """Compiles ahead of the first batch: a `Spec` stands for an array of that shape.

        Nothing is run and no variable changes; models and optimizers that are not built yet
        are built.

        Args:
            *args: The arguments of a call, with a `Spec` for each array.
            largest: Where a `Spec` has None or a name for a size, the largest one that will come,
                or a dict of them by name: the programs for all sizes up to it are compiled.
            **kwargs: The same by name.

        Example:
            >>> import keras, numpy as np, trainstep as ts
            >>> double = ts.function(lambda x: 2 * x)
            >>> double.warm_up(ts.Spec((32, 4)))
            >>> double.warm_up(ts.Spec((None, 4)), largest=64)
            >>> entries = len(double.ledger)
            >>> _ = double(np.ones((17, 4), "float32"))
            >>> len(double.ledger) == entries
            True
        """
        check_largest(self.__name__, largest)
        pairs = list(zip(self._compiler.parameters.names, self._bind(args, kwargs), strict=True))
        sizes = [largest] if largest is None else [largest, 1]  # 1 may be a case of its own
        for size in sizes:
            values = [filled_with_zeros(self.__name__, *pair, size) for pair in pairs]
            self._compiler.warm_up(values, smaller=size is largest and size is not None)

    def verify(self, *args: Any, tolerance: float = TOLERANCE, **kwargs: Any) -> Verification:
        """Compares the exact program with the one for sizes that vary, on one batch.

        Nothing is trained. The programs are made for this and dropped; a step with side effects
        in Python runs them again.

        Args:
            *args: The arguments of a call.
            tolerance: The relative difference that is taken as rounding.
            **kwargs: The same by name.

        Returns:
            A `Verification`, true if the numbers agree.

        Example:
            >>> import keras, numpy as np, trainstep as ts
            >>> mean = ts.function(lambda x: keras.ops.mean(x))
            >>> mean.verify(np.ones((5, 3))).exact
            True
        """
        policy = "bucket" if self._engine.sizes == "bucket" else "dynamic"
        sizes = self._compiler.sizes(self._bind(args, kwargs))
        grid = {name: (2 * size,) for name, size in sizes.items()}
        shapes = Shapes(policy, grid=grid, background=False)
        plain = StepSettings(
            signature=self._settings.signature,
            shapes=Shapes("exact"),
            options=self._settings.options,
            policies=Policies("allow", "ignore"),
            engine=self._engine,
        )
        fn = probed(self._fn)
        exact: Any = Function(fn, plain)
        varying: Any = Function(fn, replace(plain, shapes=shapes, dynamic=self._settings.dynamic))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SizesWarning)
            for each in (exact, varying):  # a trace may draw random numbers, too
                each.warm_up(*args, **kwargs)
        refusals = [event.reason for event in varying.ledger if event.kind == "refused"]
        if refusals or not varying._programs.families:
            return Verification("; ".join(refusals) or "no size varies", {}, tolerance)
        families = next(iter(varying._programs.families.values()))
        written = families[0].traced.writes
        draws = self._engine.fixed_rng_state
        found = compared(exact, varying, (args, kwargs), written, draws)
        return Verification("", found, tolerance)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundFunction(self, instance)

    def __repr__(self) -> str:
        return f"<trainstep.function {self.__name__}: {self.trace_count} traces>"

    def __reduce__(self) -> str:
        return str(getattr(self, "__qualname__", self.__name__))  # by name, as functions are


class BoundFunction:
    """A `Function` taken from an instance, as a method is."""

    def __init__(self, function: Function[..., Any], instance: Any) -> None:
        self.__func__ = function
        self.__self__ = instance
        self.__doc__ = function.__doc__
        self.__wrapped__ = getattr(function, "__wrapped__", function).__get__(instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def warm_up(self, *args: Any, **kwargs: Any) -> None:
        """See `Function.warm_up`."""
        self.__func__.warm_up(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)

    def __repr__(self) -> str:
        return f"<bound {self.__func__!r} of {self.__self__!r}>"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, BoundFunction)
            and self.__func__ is other.__func__
            and self.__self__ is other.__self__
        )

    def __hash__(self) -> int:
        return hash((id(self.__func__), id(self.__self__)))


def _name_of(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return str(getattr(fn, "__name__", type(fn).__name__))
