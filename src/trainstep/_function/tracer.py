"""Runs the user's Python once, and finds out what it depends on and what it did besides.

call --Reach--> what the step reaches in Python
--Observer--> side effects --engine.trace--> the recorded step
--Watch--> the flags and values that have to be the same at every later call
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
from trainstep._function.inside.nan_guard import hearing, judged
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
from trainstep._surroundings.reach import Reach, reached, taken
from trainstep._surroundings.side_effects import Observer

log = logging.getLogger("trainstep")


@dataclass(frozen=True, slots=True)
class Record:
    """A step that was traced."""

    traced: Traced
    build: Build
    watch: Watch
    effects: tuple[str, ...]


class Tracer:
    """Traces one function.

    Args:
        fn: The function.
        run: The function to run in its place: the same, with the NaN guard around it.
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
        self._told: set[Any] = set()

    def trace(
        self, call: Call, pattern: Pattern | None = None, first: Sizes | None = None
    ) -> Record:
        """Runs the user's Python, for the shapes of a call or for all that fit a pattern."""
        created, record = self._trace_once(call, pattern, first)
        if any(v.name == "dynamic_scale" for v in created):
            # Before it is built, Keras's loss-scaling optimizer scales by a Python number,
            # which is in the trace now, and afterwards by this variable. Once more, then.
            _, record = self._trace_once(call, pattern, first)
        return record

    def _trace_once(
        self, call: Call, pattern: Pattern | None, first: Sizes | None
    ) -> tuple[list[Any], Record]:
        """Runs the user's Python once.

        Raises:
            Refused: If there is a pattern, and anything else goes wrong. A mistake of the user's
                comes up again when the call is traced for its shapes alone.
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
            with hearing() as findings:
                result = self._observed(arguments, None if recorder.uncompiled else observer)
            result = judged(result, findings)
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
                self._blame_the_batch(error)
                raise
            where = user_code.raised_at(asked.__traceback__)
            raise ControlFlowError(self._name, *where) from error
        # A step that runs as Python at every call depends on nothing and does everything again.
        effects = [] if observer is None or traced.uncompiled else observer.found()
        self._tell(effects)
        captures = Captures([], {}) if traced.uncompiled else self._captures(values, before)
        stale = None if self._policies.captures == "retrace" else self._tell_stale
        layers = recorder.layers.values()
        watch = Watch(layers, traced.reads, traced.writes, captures, stale)
        return recorder.created, Record(traced, builds[-1], watch, tuple(map(str, effects)))

    def _blame_the_batch(self, error: Exception) -> None:
        """Makes an error of a trainer's step one of its batch, if no user's code raised it."""
        if self._settings.is_trainer_step and not user_code.raised_at(error.__traceback__)[1]:
            raise ArgumentError(
                self._name,
                "batch",
                "arrays, in a structure and of shapes that the model, loss and metrics take",
                _first_line(error),
                "compare `x`, `y` and `sample_weight` with the model's inputs and outputs",
            ) from error

    def _observed(self, arguments: Sequence[Any], observer: Observer | None) -> Any:
        """Runs the step, and notes what it does besides."""
        if observer is None:
            return self._parameters.call(self._run, arguments)
        copies = ArgumentCopies(self._parameters.names, arguments)
        with observer:
            result = self._parameters.call(self._run, arguments)
        observer.add(copies.mutated(self._fn))
        return result

    def _asks_for_a_value(self, error: BaseException) -> BaseException | None:
        """The error behind `error` that asked for a value: Keras wraps some in others."""
        found: BaseException | None = error
        while found is not None and not self._engine.asks_for_a_value(found):
            found = found.__context__
        return found

    # Python around the step -----------------------------------------------------------------

    def _reach(self, values: Sequence[Any]) -> Reach:
        """What the step reaches in Python, as far as it can be followed."""
        if self._policies.captures == "ignore" and self._policies.side_effects == "allow":
            return Reach()
        found = reached(self._fn, values, self._settings.uses)
        for missed in found.missed[:1]:
            log.warning("not all that `%s` takes from around it is watched: %s", self._name, missed)
        return found

    def _observer(self, reach: Reach) -> Observer | None:
        mode = self._policies.side_effects
        if mode == "allow":
            return None
        return Observer(self._name, reach, self._engine.is_tensor, raises=mode == "raise")

    def _tell(self, effects: Sequence[Effect]) -> None:
        """Warns of each side effect of a trace."""
        for effect in effects:
            message = effect.message(self._name)
            warnings.warn_explicit(message, SideEffectWarning, effect.file, effect.line)
            for listener in listeners:
                listener.affected(self._name, effect)

    def _captures(self, values: Sequence[Any], before: Reach) -> Captures:
        """The values that the step took from around it, and did not change itself."""
        if self._policies.captures == "ignore":
            return Captures([], {})
        captures = taken(before, self._reach(values))
        for place in captures.unwatched:
            self._tell_large(place)
        captures.unwatched.clear()  # nobody is to hold them
        return captures

    def _tell_large(self, place: Place) -> None:
        if place.label not in self._told:
            self._told.add(place.label)
            array = isinstance(place.value, np.ndarray)
            size = f"{place.value.nbytes / 1e6:.0f} MB" if array else f"{len(place.value)} entries"
            message = (
                f"`{self._name}` takes {place.label} ({size}) from around it.\n"
                f"  what happens: {causes.LARGE.happens}\n"
                f"  to fix:       {causes.LARGE.cure}"
            )
            warnings.warn_explicit(message, StaleCaptureWarning, place.file, place.line)

    def _tell_stale(self, changes: list[tuple[str, str, str]]) -> None:
        """Raises or warns of values that have changed since the trace."""
        for listener in listeners:
            listener.stale(self._name, changes)
        listed = "; ".join(f"{label}: {before} -> {now}" for label, before, now in changes)
        message = (
            f"`{self._name}`: a value that the step took from around it has changed.\n"
            f"  changed:  {listed}\n"
            f"  why:      {causes.STALE.happens}\n"
            f"  to fix:   {causes.STALE.cure}"
        )
        if self._policies.captures == "raise":
            raise StaleCaptureError(message)
        warnings.warn(message, StaleCaptureWarning, stacklevel=user_code.depth())


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def _first_line(error: BaseException) -> str:
    """What went wrong, in one line, of the error that others were raised from."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in _COLOUR.sub("", str(error)).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("Exception encountered when calling"):
        return lines[1]  # Keras puts the layer's name first
    return lines[0] if lines else type(error).__name__
