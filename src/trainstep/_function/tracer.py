"""Traces a step: runs the user's Python once, and finds its captured values and side effects.

call --Reach--> the Python objects that the step can reach
--Observer--> side effects --engine.trace--> the recorded step
--Watch--> the flags and captured values that have to be the same at every later call
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainstep._common import user_code
from trainstep._common.errors import (
    ArgumentError,
    ControlFlowError,
    SideEffectWarning,
    StaleCaptureError,
    StaleCaptureWarning,
    TrainstepError,
)
from trainstep._engines import Refused, Sizes, Traced
from trainstep._explain import causes
from trainstep._explain.causes import Effect
from trainstep._explain.ledger import listeners
from trainstep._function.arguments import Arguments
from trainstep._function.inside.nan_guard import add_checks, collecting_findings
from trainstep._function.parameters import Parameters
from trainstep._function.settings import StepSettings
from trainstep._function.sizes.families import Call
from trainstep._function.sizes.pattern import Pattern, enlarged
from trainstep._function.validity import Watch
from trainstep._state.control_flow import traced_control_flow
from trainstep._state.outputs import Build, take_out
from trainstep._state.random_seeds import traced_seeds
from trainstep._state.scopes import Recorder, deferred_constants
from trainstep._surroundings.captures import Captures
from trainstep._surroundings.mutations import ArgumentCopies
from trainstep._surroundings.places import Place
from trainstep._surroundings.reach import Reach, captured_values, reached
from trainstep._surroundings.side_effects import Observer

log = logging.getLogger("trainstep")


@dataclass(frozen=True, slots=True)
class Record:
    """A traced step."""

    traced: Traced
    build: Build
    watch: Watch
    effects: tuple[str, ...]


class Tracer:
    """Traces one function.

    Args:
        fn: The function.
        run: The function to run instead: the same, wrapped by the NaN guard.
        parameters: Its parameters.
        arguments: Flattens the values of a call, and rebuilds them.
        settings: The settings of the step.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        run: Callable[..., Any],
        parameters: Parameters,
        arguments: Arguments,
        settings: StepSettings,
    ) -> None:
        self._fn, self._run = fn, run
        self._parameters, self._arguments = parameters, arguments
        self._settings, self._name = settings, settings.name
        self._engine, self._policies = settings.engine, settings.policies
        self._warned: set[Any] = set()

    def trace(
        self, call: Call, pattern: Pattern | None = None, first: Sizes | None = None
    ) -> Record:
        """Traces the step, for the shapes of a call or for all shapes that fit a pattern."""
        created, record = self._trace_once(call, pattern, first)
        if any(v.name == "dynamic_scale" for v in created):
            # Before it is built, Keras's loss-scaling optimizer scales by a Python number, which is
            # now a constant of the trace; afterwards by this variable. So the step is traced again.
            _, record = self._trace_once(call, pattern, first)
        return record

    def _trace_once(
        self, call: Call, pattern: Pattern | None, first: Sizes | None
    ) -> tuple[list[Any], Record]:
        """Runs the user's Python once.

        Raises:
            Refused: For any error, if there is a pattern. An error in the user's code is raised
                again when the call is traced for its exact shapes.
        """
        recorder = Recorder(self._engine.current_graph)
        builds: list[Build] = []
        values = call.values
        objects = self._arguments.objects(values)
        recorder.engine, recorder.objects = self._engine, objects
        recorder.sizes_vary = pattern is not None
        leaves, axes = call.leaves, None
        if pattern is not None:
            leaves, axes = enlarged(leaves, pattern, first or {}), pattern.axes
        before = self._reach(values)
        observer = self._observer(before)

        def step(tensors: Sequence[Any]) -> list[Any]:
            arguments = self._arguments.rebuild(values, iter(tensors))
            with collecting_findings() as findings:
                result = self._observed(arguments, None if recorder.uncompiled else observer)
            result = add_checks(result, findings)
            outputs, build = take_out(result, self._engine.is_tensor, objects)
            builds.append(build)
            return outputs

        try:
            control = traced_control_flow(by_value=self._engine.branches_by_value)
            with control, deferred_constants(), traced_seeds():
                traced = self._engine.trace(step, leaves, recorder, self._settings.options, axes)
        except (TrainstepError, Refused) as error:
            if pattern is None or isinstance(error, Refused):
                raise
            raise Refused(_first_line(error)) from error
        except Exception as error:
            if pattern is not None:
                raise Refused(_first_line(error)) from error
            asked = self._asks_for_a_value(error)
            if asked is None:
                self._raise_as_batch_error(error)
                raise
            where = user_code.raised_at(asked.__traceback__)
            raise ControlFlowError(self._name, *where) from error
        # An uncompiled step runs its Python at every call: no value is captured, no effect is lost.
        effects = [] if observer is None or traced.uncompiled else observer.found()
        self._report_effects(effects)
        captures = Captures([], {}) if traced.uncompiled else self._captures(values, before)
        stale = None if self._policies.captures == "retrace" else self._report_stale
        layers = recorder.layers.values()
        watch = Watch(layers, traced.reads, traced.writes, captures, stale)
        return recorder.created, Record(traced, builds[-1], watch, tuple(map(str, effects)))

    def _raise_as_batch_error(self, error: Exception) -> None:
        """Raises an error of a trainer's step as one of its batch, unless user code raised it."""
        if self._settings.is_trainer_step and not user_code.raised_at(error.__traceback__)[1]:
            raise ArgumentError(
                self._name,
                "batch",
                "arrays of a structure and shapes that the model, loss and metrics accept",
                _first_line(error),
                "compare `x`, `y` and `sample_weight` with the model's inputs and outputs",
            ) from error

    def _observed(self, arguments: Sequence[Any], observer: Observer | None) -> Any:
        """Runs the step and observes its side effects."""
        if observer is None:
            return self._parameters.call(self._run, arguments)
        copies = ArgumentCopies(self._parameters.names, arguments)
        with observer:
            result = self._parameters.call(self._run, arguments)
        observer.add(copies.mutated(self._fn))
        return result

    def _asks_for_a_value(self, error: BaseException) -> BaseException | None:
        """Returns the error in the chain that asked for a value: Keras wraps some errors."""
        found: BaseException | None = error
        while found is not None and not self._engine.asks_for_a_value(found):
            found = found.__context__
        return found

    # Captures and side effects --------------------------------------------------------------

    def _reach(self, values: Sequence[Any]) -> Reach:
        """Returns the Python objects that the step can reach, as far as they can be followed."""
        if self._policies.captures == "ignore" and self._policies.side_effects == "allow":
            return Reach()
        found = reached(self._fn, values, self._settings.uses)
        for missed in found.missed[:1]:
            text = "not all captured values of `%s` are compared at later calls: %s"
            log.warning(text, self._name, missed)
        return found

    def _observer(self, reach: Reach) -> Observer | None:
        mode = self._policies.side_effects
        if mode == "allow":
            return None
        return Observer(self._name, reach, self._engine.is_tensor, raises=mode == "raise")

    def _report_effects(self, effects: Sequence[Effect]) -> None:
        """Warns of each side effect of a trace."""
        for effect in effects:
            message = effect.message(self._name)
            warnings.warn_explicit(message, SideEffectWarning, effect.file, effect.line)
            for listener in listeners:
                listener.affected(self._name, effect)

    def _captures(self, values: Sequence[Any], before: Reach) -> Captures:
        """Returns the captured values that the step does not change itself."""
        if self._policies.captures == "ignore":
            return Captures([], {})
        captures = captured_values(before, self._reach(values))
        for place in captures.unwatched:
            self._warn_large(place)
        captures.unwatched.clear()  # they may be large: keep no reference
        return captures

    def _warn_large(self, place: Place) -> None:
        if place.label not in self._warned:
            self._warned.add(place.label)
            array = isinstance(place.value, np.ndarray)
            size = f"{place.value.nbytes / 1e6:.0f} MB" if array else f"{len(place.value)} entries"
            message = (
                f"`{self._name}` captures {place.label} ({size}).\n"
                f"  what happens: {causes.LARGE.happens}\n"
                f"  to fix:       {causes.LARGE.cure}"
            )
            warnings.warn_explicit(message, StaleCaptureWarning, place.file, place.line)

    def _report_stale(self, changes: list[tuple[str, str, str]]) -> None:
        """Raises an error or warns of captured values that have changed since the trace."""
        for listener in listeners:
            listener.stale(self._name, changes)
        listed = "; ".join(f"{label}: {before} -> {now}" for label, before, now in changes)
        message = (
            f"`{self._name}`: a captured value has changed since the trace.\n"
            f"  changed:  {listed}\n"
            f"  why:      {causes.STALE.happens}\n"
            f"  to fix:   {causes.STALE.cure}"
        )
        if self._policies.captures == "raise":
            raise StaleCaptureError(message)
        warnings.warn(message, StaleCaptureWarning, stacklevel=user_code.depth())


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def _first_line(error: BaseException) -> str:
    """Returns the first line of the error that others were raised from."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in _COLOUR.sub("", str(error)).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("Exception encountered when calling"):
        return lines[1]  # Keras puts the name of the layer before the error
    return lines[0] if lines else type(error).__name__
