"""`Function`: the path of one call, from Python values to a compiled step and back.

    values -> key and arrays -> program (hit) ---------------------> run, write back -> outputs
                             -> miss: limit, trace, compile, ledger -^

`Function._call` has one line per stage; each stage is a file of its own. A call like the last one
takes the fast path, where one generated function does all stages of a hit (`fast_path.py`).
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
from trainstep._function.fast_path import fast_path
from trainstep._function.policies import Policies
from trainstep._function.program_cache import MISS, Program, StopFlag
from trainstep._function.settings import StepSettings
from trainstep._function.sizes.policy import Shapes
from trainstep._function.verify import TOLERANCE, Verification, compared, probed
from trainstep._state.scopes import current_scope

P = ParamSpec("P")
R = TypeVar("R")


class Function(Generic[P, R]):
    """A step that is compiled once per signature. `trainstep.function` makes it.

    Attributes:
        ledger: Every trace of this function, with its reason.
    """

    def __init__(self, fn: Callable[P, R], settings: StepSettings | None = None) -> None:
        functools.update_wrapper(self, fn, updated=())
        settings = settings or StepSettings()
        self.__name__: str = settings.name or _name_of(fn)
        self._fn, self._settings, self._engine = fn, settings, settings.engine
        self._compiler = Compiler(fn, replace(settings, name=self.__name__))
        # A call inside another step runs this instead of a program.
        self._inlined: Callable[P, R] = self._compiler.guard.wrap(settings.inlined or fn)
        self.ledger = self._compiler.ledger
        self._idle = self._engine.is_idle
        self._bind = self._compiler.parameters.bind
        self._flatten = self._compiler.flatten
        self._programs, self._cells = self._compiler.programs, self._compiler.cells

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = MISS if kwargs else self._programs.hit(args, self._cells)
        return self._call(args, kwargs) if result is MISS else result

    def _call(self, args: Any, kwargs: Any) -> R:
        # Inside a scope (a trace, a differentiation, a scope of the user's) the step is inlined.
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
            path = fast_path(program, args, leaves, self._compiler.arguments)
            self._programs.set_fast_path(key, args, path, program)
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
        """Returns a function of the other arguments, as a tuple, with one Python frame less."""
        programs, call, cells = self._programs, self._call, self._cells

        def run(first: Any) -> R:
            args = first + last
            result: R = programs.hit(args, cells)
            return call(args, {}) if result is MISS else result

        return run

    def loop(self, *last: Any) -> Callable[[Iterable[Any], StopFlag], int]:
        """Returns a function that calls this one with each tuple of arguments, and `last`.

        It drops the outputs. It ends after the last tuple, or after a call that sets the flag, and
        returns the number of calls.
        """
        programs, cells, run = self._programs, self._cells, self.shortcut(*last)

        def run_all(firsts: Iterable[Any], stop: StopFlag) -> int:
            left, count = iter(firsts), 0
            while True:
                ran, other = programs.loop(left, last, cells, stop)
                count += ran
                if other is None:
                    return count
                run(other)
                count += 1
                if stop.is_set():
                    return count

        return run_all

    def laid_out(self, layout: Any) -> Function[P, R]:
        """Returns the function with another layout, not traced yet; itself if it has that one."""
        options = self._settings.options
        if layout is options.layout:
            return self
        return Function(self._fn, replace(self._settings, options=replace(options, layout=layout)))

    @property
    def trace_count(self) -> int:
        """The number of traces."""
        return self.ledger.traces

    @property
    def program_count(self) -> int:
        """The number of programs in the cache."""
        return len(self._programs)

    def written(self) -> list[Any]:
        """Returns the variables that its programs write."""
        return self._compiler.written()

    @property
    def padding(self) -> float:
        """The share of computation spent on padding, in programs with dynamic sizes."""
        return self._programs.padding()

    @property
    def skipped(self) -> int:
        """The number of batches that were skipped as not finite; see `nan_policy`."""
        return self._compiler.guard.skipped()

    def warm_up(
        self, *args: Any, largest: int | Mapping[str, int] | None = None, **kwargs: Any
    ) -> None:
        """Compiles ahead of the first batch, given a `Spec` for each array.

        It runs no step and changes no variable. It builds models and optimizers that are not
        built yet.

        Args:
            *args: The arguments of a call, with a `Spec` for each array.
            largest: The largest size of the axes that are None or a name in a `Spec`, or a dict of
                them by name: the programs for all sizes up to it are compiled.
            **kwargs: The keyword arguments of a call, likewise.

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
        # Size 1 may need a record of its own.
        sizes = [largest] if largest is None else [largest, 1]
        for size in sizes:
            values = [filled_with_zeros(self.__name__, *pair, size) for pair in pairs]
            self._compiler.warm_up(values, smaller=size is largest and size is not None)

    def verify(self, *args: Any, tolerance: float = TOLERANCE, **kwargs: Any) -> Verification:
        """Compares the exact program with the one for dynamic sizes, on one batch.

        The variables keep their values. The programs are compiled for the comparison and dropped;
        tracing runs Python side effects of the step again.

        Args:
            *args: The arguments of a call.
            tolerance: The largest relative difference that counts as rounding.
            **kwargs: The keyword arguments of a call.

        Returns:
            A `Verification`, which is true if the results agree.

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
        dynamic: Any = Function(fn, replace(plain, shapes=shapes, dynamic=self._settings.dynamic))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SizesWarning)
            for each in (exact, dynamic):  # traced first: tracing may draw random numbers
                each.warm_up(*args, **kwargs)
        refusals = [event.reason for event in dynamic.ledger if event.kind == "refused"]
        if refusals or not dynamic._programs.families:
            return Verification("; ".join(refusals) or "no size is dynamic", {}, tolerance)
        families = next(iter(dynamic._programs.families.values()))
        written = families[0].traced.writes
        same_rng = self._engine.fixed_rng_state
        found = compared(exact, dynamic, (args, kwargs), written, same_rng)
        return Verification("", found, tolerance)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundFunction(self, instance)

    def __repr__(self) -> str:
        return f"<trainstep.function {self.__name__}: {self.trace_count} traces>"

    def __reduce__(self) -> str:
        # Pickled by name, like a plain function.
        return str(getattr(self, "__qualname__", self.__name__))


class BoundFunction:
    """A `Function` bound to an instance, like a method."""

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
