"""The compiled steps of one trainer, each made when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from trainstep._data.batch_checks import BatchCheck
from trainstep._data.protocol import Batch
from trainstep._engines import Options
from trainstep._explain.ledger import Events, merged
from trainstep._function.function import Function
from trainstep._function.parameters import Parameters
from trainstep._function.policies import Policies
from trainstep._function.sizes.policy import Shapes
from trainstep._state.optimizer_slots import make_known
from trainstep._trainer.inspect import Inspector
from trainstep._trainer.logs import Logs, LogsAt
from trainstep._trainer.recipe import Recipe
from trainstep._trainer.run_fetches import Fetch, needs_targets
from trainstep._trainer.steps import Steps


class Nested(dict[str, Any]):
    """The values of a batch inside another step: tensors, which nobody can read yet."""


@dataclass(frozen=True)
class Settings:
    """How steps are compiled and checked."""

    optimize: str
    max_traces: int | None
    check_values: bool
    shapes: Shapes | str
    dynamic: Mapping[str, Any] | None
    policies: Policies
    layout: Any = None


class Functions:
    """Makes and keeps the compiled steps of a model with a recipe.

    Attributes:
        model: The model.
    """

    def __init__(self, model: Any, recipe: Recipe, settings: Settings) -> None:
        self.model, self._recipe, self._settings = model, recipe, settings
        self._steps = Steps(model, recipe)
        self._made: dict[Any, Function[..., Any]] = {}

    def step(self, kind: str, repeat: int = 0) -> Function[..., Any]:
        """The step of a kind: train, test or predict; or so many of them in one call."""
        known = self._made.get((kind, repeat))
        if known is not None:
            return known
        step: Any = getattr(self._steps, kind)
        fresh = self._recipe.fresh

        def run(x: Any, y: Any, sample_weight: Any, class_weight: Any) -> Any:
            # Several in one call are steps of a `fit`, whose metrics run on.
            return step(x, y, sample_weight, class_weight, False if repeat else fresh.value)

        def nested(x: Any, y: Any, sample_weight: Any, class_weight: Any) -> Any:
            return Nested(step(x, y, sample_weight, class_weight, True))

        def predict(x: Any) -> Any:
            return step(x)

        forward = kind == "predict"
        made = self._made[kind, repeat] = self._function(
            predict if forward else run,
            kind + (f" x {repeat}" if repeat else ""),
            repeat=repeat,
            inlined=predict if forward else nested,
            check=None if repeat else self._check(f"{kind}_on_batch", targets=not forward),
            trains=kind == "train",
        )
        return made

    def fetch(self, names: list[str], *, update: bool, training: bool) -> Function[..., Any]:
        """The step that returns named values."""
        key = ("run", tuple(names), update, training)
        if key not in self._made:
            step = Fetch(self.model, self._recipe, names, update=update, training=training)
            self._made[key] = self._function(
                step.__call__,
                f"run({', '.join(names)})",
                check=self._check("run", targets=update or needs_targets(names)),
                trains=update,
            )
        return self._made[key]

    def inspector(self) -> tuple[Inspector, Function[..., Any], Function[..., Any]]:
        """The two steps that look at a batch, and what they belong to."""
        if "inspect" not in self._made:
            inspector = self._inspector = Inspector(self.model, self._recipe)
            check = self._check("inspect", targets=True, values=False)
            self._made["inspect"] = self._function(inspector.look, "inspect", check=check)
            self._made["inspect by activation"] = self._function(
                inspector.by_activation, "inspect by activation"
            )
        return self._inspector, self._made["inspect"], self._made["inspect by activation"]

    def _function(
        self,
        fn: Callable[..., Any],
        name: str,
        *,
        repeat: int = 0,
        inlined: Callable[..., Any] | None = None,
        check: Callable[..., None] | None = None,
        trains: bool = False,
    ) -> Function[..., Any]:
        dynamic = self._settings.dynamic or {}
        policies = self._settings.policies
        if not trains:  # there is nothing to keep bad numbers out of
            policies = replace(policies, nan_policy=None)
        return Function(
            fn,
            name=f"{self.model.name}.{name}",
            max_traces=self._settings.max_traces,
            options=Options(
                optimize=self._settings.optimize, repeat=repeat, layout=self._settings.layout
            ),
            shapes=self._settings.shapes,
            dynamic={n: axes for n, axes in dynamic.items() if n in Parameters(fn).names},
            policies=policies,
            inlined=inlined,
            check=check,
            batches=check is not None,
            uses=self._recipe.used,
        )

    def _check(self, method: str, *, targets: bool, values: bool = True) -> Callable[..., None]:
        """What happens before a step is traced."""
        check = BatchCheck(
            self.model,
            f"Trainer.{method}",
            takes_targets=targets and self._recipe.takes_targets,
            losses=self._recipe.losses,
            values=values and self._settings.check_values,
        )

        def prepare(*batch: Any) -> None:
            check(*batch)
            if self.model.built:
                make_known(self._recipe.optimizer, self.model)

        return prepare

    def ledger(self) -> Events:
        """Every trace of these steps."""
        name = f"Trainer of {self.model.name}"
        return merged(name, [function.ledger for function in self._made.values()])

    def written(self) -> list[Any]:
        """The variables that the train steps write, as far as they were traced."""
        steps = [f for (kind, *_), f in self._made.items() if kind == "train"]
        return [variable for step in steps for variable in step.written()]

    def skipped(self) -> int:
        """How many batches were skipped for their numbers."""
        return sum(function.skipped for function in self._made.values())

    def metrics(self) -> dict[str, Any]:
        """The values of the metrics as they stand, if they have seen anything."""
        if not float(self._recipe.tracker.count):
            return {}
        with self._recipe.lent():
            return dict(Logs(self.model.get_metrics_result()))

    def retraces(self) -> tuple[int, str]:
        """How often a step was traced again, and why the last time."""
        again = [event for event in self.ledger() if event.index > 1 and event.runs_python]
        return len(again), str(again[-1]) if again else ""


class StepRunner:
    """Runs the batches of a loop through the steps of a kind.

    Attributes:
        tells_later: Whether `now` has all the values that the last batch has: those of metrics.
    """

    def __init__(self, functions: Functions, kind: str, classes: Any = None) -> None:
        self._functions, self._kind, self._classes = functions, kind, classes
        self._skipped = functions.skipped()
        own = getattr(functions.model.compute_metrics, "__func__", None)
        self.tells_later = own is keras.Model.compute_metrics

    def calls(self, count: int) -> Callable[[Batch], Any]:
        """What runs one batch, or a stack of `count` in one call."""
        step, classes = self._step(count)
        return step.shortcut(classes)

    def loop(self, count: int) -> Callable[[Iterable[Batch], Mapping[str, Any], str], int]:
        """What runs one batch, or one stack, after the other, whose values nobody reads."""
        step, classes = self._step(count)
        return step.loop(classes)

    def prepare(self, batch: Batch, count: int) -> None:
        """Builds and compiles what such a call needs."""
        step, classes = self._step(count)
        step.warm_up(*batch, classes)

    def _step(self, count: int) -> tuple[Function[..., Any], Any]:
        step, classes = self._functions.step(self._kind, 0 if count == 1 else count), self._classes
        if classes is not None and count > 1:
            classes = np.broadcast_to(classes, (count, *classes.shape))
        return step, classes

    def now(self) -> dict[str, Any]:
        """The values of the metrics as they stand."""
        return self._functions.metrics()

    @staticmethod
    def logs(values: dict[str, Any], count: int) -> Sequence[Logs]:
        """The values after each of the batches of a call."""
        return [Logs(values)] if count == 1 else [LogsAt(values, i) for i in range(count)]

    def of_epoch(self, last: Logs) -> dict[str, Any]:
        """The values after the last batch; if any was skipped, of the batches that were not."""
        values, before = dict(last), self._skipped
        self._skipped = self._functions.skipped()
        if self._skipped == before:
            return values
        found = self._functions.metrics()
        return {name: found.get(name, value) for name, value in values.items()}
