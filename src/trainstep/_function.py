"""`function`: the path of one call, from Python values to a compiled step and back.

    values -> key and arrays -> program (hit) ---------------------> run, write back -> outputs
                             -> miss: limit, trace, compile, ledger -^

`Function.__call__` reads like this line; each stage is a file of its own.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload

from trainstep import _engines, _site
from trainstep._arguments import Arguments, like, structure
from trainstep._control import traced_control_flow
from trainstep._domain import domain_of
from trainstep._engines import Engine, Executable, Options, Traced
from trainstep._errors import ArgumentError, ControlFlowError, RetraceLimitError, TrainstepError
from trainstep._ledger import Ledger, TraceEvent, advice
from trainstep._outputs import Build, take_out
from trainstep._parameters import Parameters
from trainstep._program import MISS, Key, Program, Programs, again
from trainstep._signature import Signature, nearest
from trainstep._spec import Spec, check, conform
from trainstep._state import Recorder, active, deferred_constants
from trainstep._tuning import Tuned
from trainstep._watch import Watch

P = ParamSpec("P")
R = TypeVar("R")

# One trace at a time: tracing builds layers and runs the user's Python, which is not ours to
# run twice at once. Hits do not take it.
_tracing = threading.RLock()


class Function(Generic[P, R]):
    """A step that is compiled once per signature. Made by `trainstep.function`."""

    def __init__(
        self,
        fn: Callable[P, R],
        *,
        signature: Sequence[Any] | None = None,
        max_traces: int | None = None,
        name: str | None = None,
        options: Options | None = None,
        engine: Engine | None = None,
    ) -> None:
        functools.update_wrapper(self, fn, updated=())
        inner = fn
        while isinstance(inner, functools.partial):
            inner = inner.func
        self.__name__: str = name or str(getattr(inner, "__name__", type(inner).__name__))
        self._fn = fn
        self._engine = engine or _engines.current()
        self._options = options or Options()
        self._max_traces = max_traces
        self._parameters = Parameters(fn)
        self._specs = (
            None if signature is None else self._parameters.specs(self.__name__, signature)
        )
        self._arguments = Arguments(self._engine)
        self._programs = Programs()
        self._idle = self._engine.idle
        self._again = again(None, None)  # the call before, if this is another one like it
        self.ledger = Ledger(self.__name__)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self._idle() and (active() is not None or self._engine.inlines(self.__name__)):
            return self._fn(*args, **kwargs)
        result: R
        if not kwargs:
            result = self._again(args)
            if result is not MISS:
                return result
        values = self._parameters.bind(args, kwargs)
        key, leaves = self._flatten(values)
        program = self._programs.find(key)
        if program is None:
            return self._first_run(self._compile(values), leaves)
        self._again = again(program, args if self._plain(args, kwargs) else None)
        result = program(leaves)
        return result

    @property
    def trace_count(self) -> int:
        """How often the function was traced."""
        return len(self.ledger)

    def warm_up(self, *args: Any, **kwargs: Any) -> None:
        """Compiles ahead of the first batch: a `Spec` stands for an array of that shape.

        Nothing is run and no variable changes; models and optimizers that are not built yet
        are built.

        Example:
            >>> import keras, trainstep as ts
            >>> double = ts.function(lambda x: 2 * x)
            >>> double.warm_up(ts.Spec((32, 4)))
            >>> double.trace_count
            1
        """
        bound = self._parameters.bind(args, kwargs)
        values = [
            _zeros(self.__name__, name, value)
            for name, value in zip(self._parameters.names, bound, strict=True)
        ]
        key, _ = self._flatten(values)
        if self._programs.find(key) is None:
            self._compile(values)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundFunction(self, instance)

    def __repr__(self) -> str:
        return f"<trainstep.function {self.__name__}: {self.trace_count} traces>"

    def __reduce__(self) -> str:
        return str(getattr(self, "__qualname__", self.__name__))  # by name, as functions are

    # A missing program ------------------------------------------------------------------------

    def _flatten(self, values: Sequence[Any]) -> tuple[Key, list[Any]]:
        if self._specs is not None:
            values = conform(self._specs, values)
        try:
            return self._arguments.flatten(values)
        except (TypeError, ValueError):
            for _ in self._arguments.parts(self.__name__, self._parameters.names, values):
                pass  # raises an ArgumentError that names the culprit
            raise

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is nothing but arrays that enter as they are."""
        plain = not kwargs and self._specs is None and len(args) == len(self._parameters.names)
        return plain and all(map(self._arguments.is_plain, args))

    def _compile(self, values: Sequence[Any]) -> Program:
        site = _site.caller()
        with _tracing:
            key, leaves = self._flatten(values)
            program = self._programs.find(key)  # another thread may have been faster
            if program is not None:
                return program
            if self._specs is not None:
                values = conform(self._specs, values)
                self._check(values)
            signature, event = self._announce(values, site)
            if self._max_traces is not None and len(self.ledger) >= self._max_traces:
                raise RetraceLimitError(self._max_traces, event)
            started = time.perf_counter()
            recorder = Recorder(self._engine.place)
            traced, build = self._trace(values, leaves, recorder)
            if any(v.name == "dynamic_scale" for v in recorder.created):
                # Before it is built, Keras's loss-scaling optimizer scales by a Python number,
                # which is in the trace now, and afterwards by this variable. Once more, then.
                recorder = Recorder(self._engine.place)
                traced, build = self._trace(values, leaves, recorder)
            traced_at = time.perf_counter()
            compiler, executable = self._build(traced, event.index)
            compiled_at = time.perf_counter()
            touched = [*traced.reads, *traced.writes]
            watch = Watch(recorder.layers.values(), touched)
            program = Program(event.index, executable, build, watch, domain_of(touched))
            event = replace(
                event,
                trace_seconds=traced_at - started,
                compile_seconds=compiled_at - traced_at,
                reads=tuple(v.path for v in traced.reads),
                writes=tuple(v.path for v in traced.writes),
                compiler=compiler,
            )
            self.ledger.record(event, signature.with_flags(watch.parts()))
            self._programs.add(key, program, _objects(self._arguments, values))
            return program

    def _build(self, traced: Traced, index: int) -> tuple[str, Executable]:
        """Compiles a recorded step with the compiler asked for, or with each, to be measured."""
        if traced.uncompiled:
            return "python", traced.build("")
        quick, thorough = self._engine.compilers[0], self._engine.compilers[-1]
        if self._options.optimize != "measure" or quick == thorough:
            compiler = thorough if self._options.optimize == "full" else quick
            return compiler, traced.build(compiler)

        def decided(compiler: str, executable: Executable) -> None:
            self._programs.replace(index, executable)
            self.ledger.set_compiler(index, compiler)

        candidates = {name: traced.build(name) for name in (quick, thorough)}
        return "measuring", Tuned(candidates, decided)

    def _announce(self, values: Sequence[Any], site: str) -> tuple[Signature, TraceEvent]:
        """What this call is, and how it differs from the calls before, ahead of the trace."""
        flags = {p.label: p for watch in self._programs.watches() for p in watch.parts()}
        parts = self._arguments.parts(self.__name__, self._parameters.names, values)
        signature = Signature([*parts, *flags.values()])
        index, changes = nearest(signature, self.ledger.signatures)
        texts = [change.text for change in changes]
        if index is not None and not texts:
            texts = ["the earlier program was dropped with an object that it was compiled for"]
        event = TraceEvent(
            index=len(self.ledger) + 1,
            function=self.__name__,
            signature=str(signature),
            changes=tuple(texts),
            nearest=None if index is None else index + 1,
            site=site,
            advice=advice(changes),
        )
        return signature, event

    def _trace(
        self, values: Sequence[Any], leaves: Sequence[Any], recorder: Recorder
    ) -> tuple[Traced, Build]:
        builds: list[Build] = []

        def step(tensors: Sequence[Any]) -> list[Any]:
            call = self._arguments.rebuild(values, iter(tensors))
            result = self._parameters.call(self._fn, call)
            outputs, build = take_out(result, self._engine.is_tensor, values)
            builds.append(build)
            return outputs

        try:
            with traced_control_flow(by_value=self._engine.branches_by_value), deferred_constants():
                traced = self._engine.trace(step, leaves, recorder, self._options)
        except TrainstepError:
            raise
        except Exception as error:
            asked = self._asks_for_a_value(error)
            if asked is None:
                raise
            where = _site.raised_at(asked.__traceback__)
            raise ControlFlowError(self.__name__, *where) from error
        return traced, builds[-1]

    def _asks_for_a_value(self, error: BaseException) -> BaseException | None:
        """The error behind `error` that asked for a value: Keras wraps some in others."""
        found: BaseException | None = error
        while found is not None and not self._engine.asks_for_a_value(found):
            found = found.__context__
        return found

    def _first_run(self, program: Program, leaves: list[Any]) -> R:
        started = time.perf_counter()
        result: R = program(leaves)
        if self._engine.compiles_at_first_run:
            self.ledger.add_compile_seconds(program.index, time.perf_counter() - started)
        return result

    def _check(self, values: Sequence[Any]) -> None:
        assert self._specs is not None
        for name, spec, value in zip(self._parameters.names, self._specs, values, strict=True):
            self._check_one(name, spec, value)

    def _check_one(self, name: str, spec: Any, value: Any) -> None:
        if spec is None:
            return
        if not isinstance(spec, Spec):
            wanted, came = structure(spec), structure(value)
            if wanted is None or came is None or [n for n, _ in wanted] != [n for n, _ in came]:
                raise ArgumentError(
                    self.__name__,
                    name,
                    f"the structure {spec!r}",
                    f"{type(value).__name__}",
                    "pass the same structure as in `signature`",
                )
            for (suffix, inner), (_, child) in zip(wanted, came, strict=True):
                self._check_one(f"{name}{suffix}", inner, child)
            return
        parts = list(self._arguments.parts(self.__name__, [name], [value]))
        if len(parts) != 1 or parts[0].kind != "array":
            raise ArgumentError(
                self.__name__,
                spec.name or name,
                str(spec),
                "; ".join(p.text for p in parts),
                "pass one array",
            )
        shape, dtype = cast("tuple[tuple[int, ...], str]", parts[0].token)
        check(
            spec,
            shape,
            dtype,
            function=self.__name__,
            argument=name,
            canonical=self._engine.canonical,
        )


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

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, BoundFunction)
            and self.__func__ is other.__func__
            and self.__self__ is other.__self__
        )

    def __hash__(self) -> int:
        return hash((id(self.__func__), id(self.__self__)))


def _zeros(function: str, name: str, value: Any) -> Any:
    """The value with each `Spec` in it replaced by an array of that shape."""
    if isinstance(value, Spec):
        return value.zeros(function, value.name or name)
    children = structure(value)
    if children is None:
        return value
    return like(value, [_zeros(function, f"{name}{suffix}", child) for suffix, child in children])


def _objects(arguments: Arguments, values: Sequence[Any]) -> list[Any]:
    """The objects of a call that its program is compiled for."""
    found: list[Any] = []
    for value in values:
        children = structure(value)
        if children is not None:
            found += _objects(arguments, [child for _, child in children])
        elif arguments.is_object(value):
            found.append(value)
    return found


@overload
def function(fn: Callable[P, R]) -> Function[P, R]: ...
@overload
def function(
    fn: None = None,
    *,
    signature: Sequence[Any] | None = None,
    max_traces: int | None = None,
    name: str | None = None,
    donate: bool = True,
    optimize: str = "auto",
    engine: Engine | None = None,
) -> Callable[[Callable[P, R]], Function[P, R]]: ...
def function(
    fn: Any = None,
    *,
    signature: Sequence[Any] | None = None,
    max_traces: int | None = None,
    name: str | None = None,
    donate: bool = True,
    optimize: str = "auto",
    engine: Engine | None = None,
) -> Any:
    """Compiles a step: a Python function that reads and writes Keras variables.

    The function may read and write any Keras variable that it reaches: weights, batch-norm
    statistics, optimizer slots, metric state, seeds. They are discovered, not declared. It is
    traced once per signature, and every trace is in `f.ledger` with its reason.

    Args:
        fn: The function. Without it, a decorator is returned.
        signature: One `Spec`, structure of `Spec`s, or None (anything) per parameter. A call
            that does not fit raises an `ArgumentError` before anything runs.
        max_traces: The call that would need one more raises a `RetraceLimitError`.
        name: What the ledger and messages call the function.
        donate: Whether the step may reuse the memory of the variables that it writes, where
            the engine can (JAX). Turn it off if other threads read `v.value` outside any
            `function` while this one runs.
        optimize: `"trace"` takes the engine's quick compiler (TensorFlow without XLA, a replayed
            torch graph), `"full"` its thorough one (XLA, inductor), which takes longer to compile
            and is not faster on every model; `"measure"` tries both on the first calls and keeps
            the faster; `"auto"` is the quick one. JAX has only one.
        engine: For tests; the current Keras backend by default.

    Returns:
        A `Function`, called like `fn`, with `ledger`, `trace_count` and `warm_up`.

    Example:
        >>> import keras, numpy as np, trainstep as ts
        >>> total = keras.Variable(0.0)
        >>> @ts.function
        ... def add(x):
        ...     total.assign_add(keras.ops.sum(x))
        ...     return total.value
        >>> float(add(np.ones(3))), float(add(np.ones(3))), add.trace_count
        (3.0, 6.0, 1)
    """
    choices = ("auto", "trace", "full", "measure")
    if optimize not in choices:
        raise ArgumentError(
            "trainstep.function",
            "optimize",
            " or ".join(map(repr, choices)),
            repr(optimize),
            "pass one of them",
        )

    def decorate(fn: Callable[P, R]) -> Function[P, R]:
        return Function(
            fn,
            signature=signature,
            max_traces=max_traces,
            name=name,
            options=Options(donate=donate, optimize=optimize),
            engine=engine,
        )

    return decorate if fn is None else decorate(fn)
