"""The compiled steps of one trainer, each made at its first use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from trainstep import _engines
from trainstep._data.batch_checks import BatchCheck
from trainstep._data.protocol import Batch
from trainstep._engines import Options
from trainstep._explain.ledger import Events, merged
from trainstep._function.function import Function
from trainstep._function.parameters import Parameters
from trainstep._function.policies import Policies
from trainstep._function.settings import StepSettings
from trainstep._function.sizes.policy import Shapes, policy
from trainstep._state.optimizer_slots import make_known
from trainstep._trainer.callbacks import StopFlag
from trainstep._trainer.inspect import Inspector
from trainstep._trainer.logs import Logs, StackedLogs
from trainstep._trainer.recipe import Recipe
from trainstep._trainer.run_fetches import FetchStep, needs_targets
from trainstep._trainer.steps import Steps


class NestedValues(dict[str, Any]):
    """The values of a step inside another step: traced tensors, which `Logs` cannot read."""


@dataclass(frozen=True)
class Settings:
    """The settings of a `Trainer` for compiling and checking its steps."""

    optimize: str
    max_traces: int | None
    check_values: bool
    shapes: Shapes | str
    dynamic: Mapping[str, Any] | None
    policies: Policies
    layout: Any = None


class CompiledSteps:
    """Makes and stores the compiled steps of a model with a recipe.

    Attributes:
        model: The model.
    """

    def __init__(self, model: Any, recipe: Recipe, settings: Settings) -> None:
        self.model, self._recipe, self._settings = model, recipe, settings
        self._steps = Steps(model, recipe)
        self._functions: dict[Any, Function[..., Any]] = {}

    def step(self, kind: str, repeat: int = 0) -> Function[..., Any]:
        """Returns the train, test or predict step; with `repeat`, many steps in one call."""
        known = self._functions.get((kind, repeat))
        if known is not None:
            return known
        step: Any = getattr(self._steps, kind)
        reset_each_batch = self._recipe.reset_each_batch

        def run(x: Any, y: Any, sample_weight: Any, class_weight: Any) -> Any:
            # Only `fit` and `evaluate` run several steps in one call, and their metrics accumulate.
            reset = False if repeat else reset_each_batch.value
            return step(x, y, sample_weight, class_weight, reset)

        def nested(x: Any, y: Any, sample_weight: Any, class_weight: Any) -> Any:
            return NestedValues(step(x, y, sample_weight, class_weight, True))

        def predict(x: Any) -> Any:
            return step(x)

        forward = kind == "predict"
        made = self._functions[kind, repeat] = self._function(
            predict if forward else run,
            kind + (f" x {repeat}" if repeat else ""),
            repeat=repeat,
            inlined=predict if forward else nested,
            check=None if repeat else self._check(f"{kind}_on_batch", targets=not forward),
            trains=kind == "train",
        )
        return made

    def fetch(self, names: list[str], *, update: bool, training: bool) -> Function[..., Any]:
        """Returns the step that computes named values."""
        key = ("run", tuple(names), update, training)
        if key not in self._functions:
            step = FetchStep(self.model, self._recipe, names, update=update, training=training)
            self._functions[key] = self._function(
                step.__call__,
                f"run({', '.join(names)})",
                check=self._check("run", targets=update or needs_targets(names)),
                trains=update,
            )
        return self._functions[key]

    def inspector(self) -> tuple[Inspector, Function[..., Any], Function[..., Any]]:
        """Returns the inspector of the model and its two compiled steps."""
        if "inspect" not in self._functions:
            inspector = self._inspector = Inspector(self.model, self._recipe)
            check = self._check("inspect", targets=True, values=False)
            self._functions["inspect"] = self._function(
                inspector.forward_and_backward, "inspect", check=check
            )
            self._functions["inspect by activation"] = self._function(
                inspector.activation_gradients, "inspect by activation"
            )
        return self._inspector, self._functions["inspect"], self._functions["inspect by activation"]

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
        if not trains:  # nothing is updated, so no number can spoil a variable
            policies = replace(policies, nan_policy=None)
        settings = StepSettings(
            name=f"{self.model.name}.{name}",
            max_traces=self._settings.max_traces,
            options=Options(
                optimize=self._settings.optimize, repeat=repeat, layout=self._settings.layout
            ),
            shapes=policy(self._settings.shapes, _engines.current()),
            dynamic={n: axes for n, axes in dynamic.items() if n in Parameters(fn).names},
            policies=policies,
            inlined=inlined,
            check=check,
            is_trainer_step=check is not None,
            uses=self._recipe.used,
        )
        return Function(fn, settings)

    def _check(self, method: str, *, targets: bool, values: bool = True) -> Callable[..., None]:
        """Returns a function that checks a batch and makes slots known, called before a trace."""
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
        """Returns every trace of these steps."""
        name = f"Trainer of {self.model.name}"
        return merged(name, [function.ledger for function in self._functions.values()])

    def written_variables(self) -> list[Any]:
        """Returns the variables that the train steps traced so far write."""
        steps = [f for (kind, *_), f in self._functions.items() if kind == "train"]
        return [variable for step in steps for variable in step.written()]

    def skipped(self) -> int:
        """Returns the number of batches that were skipped as not finite."""
        return sum(function.skipped for function in self._functions.values())

    def metric_values(self) -> dict[str, Any]:
        """Returns the current values of the metrics; none before their first update."""
        if not float(self._recipe.tracker.count):
            return {}
        with self._recipe.installed():
            return dict(Logs(self.model.get_metrics_result()))

    def retraces(self) -> tuple[int, str]:
        """Returns the number of retraces and the reason of the last one."""
        again = [event for event in self.ledger() if event.index > 1 and event.runs_python]
        return len(again), str(again[-1]) if again else ""


class StepRunner:
    """Runs the batches of a loop through the compiled steps of one kind.

    Attributes:
        logs_are_metrics: Whether `metric_values` returns all that a batch reports. A model with its
            own `compute_metrics` may report other values too.
    """

    def __init__(self, compiled: CompiledSteps, kind: str, classes: Any = None) -> None:
        self._compiled, self._kind, self._classes = compiled, kind, classes
        self._skipped = compiled.skipped()
        method = getattr(compiled.model.compute_metrics, "__func__", None)
        self.logs_are_metrics = method is keras.Model.compute_metrics

    def batch_call(self, count: int) -> Callable[[Batch], Any]:
        """Returns a function that runs one batch, or a stack of `count`, and returns its values."""
        step, classes = self._step(count)
        return step.shortcut(classes)

    def batch_loop(self, count: int) -> Callable[[Iterable[Batch], StopFlag], int]:
        """Returns a function that runs many batches, or stacks of `count`, without their values."""
        step, classes = self._step(count)
        return step.loop(classes)

    def prepare(self, batch: Batch, count: int) -> None:
        """Builds and compiles everything that a call needs, and runs nothing."""
        step, classes = self._step(count)
        step.warm_up(*batch, classes)

    def _step(self, count: int) -> tuple[Function[..., Any], Any]:
        step, classes = self._compiled.step(self._kind, 0 if count == 1 else count), self._classes
        if classes is not None and count > 1:
            classes = np.broadcast_to(classes, (count, *classes.shape))
        return step, classes

    def metric_values(self) -> dict[str, Any]:
        """Returns the current values of the metrics."""
        return self._compiled.metric_values()

    @staticmethod
    def logs(values: dict[str, Any], count: int) -> Sequence[Logs]:
        """Returns the values after each of the batches of a call."""
        return [Logs(values)] if count == 1 else [StackedLogs(values, i) for i in range(count)]

    def epoch_logs(self, last: Logs) -> dict[str, Any]:
        """Returns the values of an epoch, without those of skipped batches."""
        values, before = dict(last), self._skipped
        self._skipped = self._compiled.skipped()
        if self._skipped == before:
            return values
        # The last batch itself may have been skipped, and its values are then not finite. The
        # metrics hold the batches that were not skipped.
        metrics = self._compiled.metric_values()
        return {name: metrics.get(name, value) for name, value in values.items()}
