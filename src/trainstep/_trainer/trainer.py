"""`Trainer`: the public class, which joins a model, its recipe and its compiled steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from keras import tree

from trainstep._data.batch_checks import check_positive, class_weight_table
from trainstep._distribution.strategy import Strategy
from trainstep._explain.ledger import Events
from trainstep._function.layout_scope import layout_of
from trainstep._function.policies import policies
from trainstep._function.sizes.policy import Shapes, check_dynamic
from trainstep._function.verify import Verification
from trainstep._state.scopes import current_scope
from trainstep._trainer.compiled_steps import CompiledSteps, Settings
from trainstep._trainer.fitting import FitMethods
from trainstep._trainer.inspect import Inspection, build_report, zeros_for
from trainstep._trainer.logs import Logs
from trainstep._trainer.recipe import Recipe, check_model
from trainstep._trainer.run_fetches import flat_names


class Trainer(FitMethods):
    """Trains a Keras model through compiled steps, the same on every engine.

    A `Trainer` accepts the arguments of `keras.Model.compile` with the same meaning; a model that
    is compiled already needs none of them. Between batches you may change the learning rate,
    `loss_weights` and `clip_norm`, which the next step reads, and freeze layers, which costs one
    retrace.

    Args:
        model: A Keras model, built or not.
        optimizer: An optimizer, or its name.
        loss: A loss, its name, or a list or dict of them by output.
        metrics: Metrics, in any form that `compile` accepts.
        weighted_metrics: Metrics that sample and class weights apply to.
        loss_weights: Weights of the outputs' losses; can be changed later.
        clip_norm: The limit of the global norm of the applied gradients; can be changed later.
        accumulate: The number of batches whose mean gradient makes one update.
        optimize: See `trainstep.function`.
        max_traces: The maximum number of traces of a step; a call that needs one more raises a
            `RetraceLimitError`.
        shapes: The policy for dynamic sizes; see `Shapes`.
        dynamic: The axes with dynamic sizes besides the batch, for example `{"x": 1}` for
            sequences.
        check_values: Whether to search the first batch of each kind for NaN.
        side_effects: The policy for Python in the model or the loss that runs during tracing only;
            see `trainstep.function`.
        captures: The policy for captured values of the model or the loss that have changed; see
            `trainstep.function`.
        nan_policy: The policy for a batch whose loss or gradients are not finite: `"skip"` updates
            no variable and counts the batch (`trainer.skipped`); `"raise"` updates no variable and
            raises a `NonFiniteError`; see `trainstep.function`.
        strategy: The devices that compute the steps; see `Mirrored`. By default the strategy of the
            enclosing `scope`, or one device.

    Example:
        >>> import keras, numpy as np, trainstep as ts
        >>> model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        >>> trainer = ts.Trainer(model, optimizer="adam", loss="mse")
        >>> x, y = np.ones((8, 2)), np.ones((8, 1))
        >>> first = trainer.train_on_batch(x, y)["loss"]
        >>> trainer.train_on_batch(x, y)["loss"] < first
        True
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        loss: Any = None,
        *,
        metrics: Any = None,
        weighted_metrics: Any = None,
        loss_weights: Any = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        optimize: str = "auto",
        max_traces: int | None = None,
        shapes: Shapes | str = "auto",
        dynamic: Mapping[str, Any] | None = None,
        check_values: bool = True,
        side_effects: str = "warn",
        captures: str = "retrace",
        nan_policy: str | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        chosen = policies("Trainer", side_effects, captures, nan_policy)
        check_model(model)
        check_dynamic("Trainer", dynamic, ("x", "y", "sample_weight"))
        check_positive("Trainer", clip_norm=clip_norm, accumulate=accumulate, max_traces=max_traces)
        self.model = model
        self._recipe = Recipe(
            model,
            {
                "optimizer": optimizer,
                "loss": loss,
                "metrics": metrics,
                "weighted_metrics": weighted_metrics,
                "loss_weights": loss_weights,
            },
            clip_norm=clip_norm,
            accumulate=accumulate,
        )
        self._layout = layout = layout_of("Trainer", strategy)
        settings = Settings(optimize, max_traces, check_values, shapes, dynamic, chosen, layout)
        self._functions = CompiledSteps(model, self._recipe, settings)
        self._train = self._functions.step("train").shortcut()
        self._test = self._functions.step("test").shortcut()
        self._predict = self._functions.step("predict")

    # A batch at a time ------------------------------------------------------------------------

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
    ) -> Logs:
        """Runs one training step.

        Inside a `trainstep.function` or a `tf.function`, the step becomes part of it, and the
        values are tensors.

        Args:
            x: The inputs: an array, or a list or dict of them.
            y: The targets.
            sample_weight: A weight per sample.
            class_weight: A weight per class, by its number.

        Returns:
            The loss and metrics of this batch alone; see `Logs`.
        """
        # The common case of `_on_batch` is repeated here, which saves a Python frame per batch.
        if class_weight is not None or self._is_accumulating:
            return self._on_batch(self._train, x, y, sample_weight, class_weight)
        values = self._train((x, y, sample_weight, None))
        return Logs(values) if type(values) is dict else values

    def test_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
    ) -> Logs:
        """Returns the loss and metrics of a batch without training; see `train_on_batch`."""
        if class_weight is not None or self._is_accumulating:
            return self._on_batch(self._test, x, y, sample_weight, class_weight)
        values = self._test((x, y, sample_weight, None))
        return Logs(values) if type(values) is dict else values

    def predict_on_batch(self, x: Any) -> Any:
        """Returns the outputs for a batch as tensors of the engine, without waiting for them."""
        return self._predict(x)

    def _on_batch(
        self, step: Callable[[Any], Any], x: Any, y: Any, weights: Any, classes: Any
    ) -> Logs:
        batch = (x, y, weights, class_weight_table(classes, weights))
        if self._is_accumulating and current_scope() is None:  # called by a callback of `fit`
            with self._metrics_accumulate(False):
                return Logs(step(batch))
        values = step(batch)
        return Logs(values) if type(values) is dict else values

    def run(
        self,
        fetches: Any,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        *,
        update: bool = False,
        training: bool = True,
    ) -> Any:
        """Computes named values of the step, and nothing else.

        Names are `"loss"`, `"outputs"`, `"metrics"`, `"gradients"`, `"gradient_norm"`,
        `"activations"` and `"updates"`; `"gradients/<variable path>"`, `"updates/<variable
        path>"`, `"activations/<layer name>"` and `"metrics/<name>"` are single ones of them.

        Args:
            fetches: A name, or a list, tuple or dict of names.
            x: The inputs.
            y: The targets; not needed for outputs and activations.
            sample_weight: A weight per sample.
            class_weight: A weight per class, by its number.
            update: Whether the step also trains. If not, no variable changes: weights, statistics,
                seeds and metrics stay as they are.
            training: Whether layers run as in training (dropout, batch statistics).

        Returns:
            The values, as tensors, in the structure of `fetches`. A name that covers several
            variables or layers returns a dict.

        Example:
            >>> import keras, numpy as np, trainstep as ts
            >>> model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
            >>> trainer = ts.Trainer(model, optimizer="sgd", loss="mse")
            >>> x, y = np.ones((8, 2)), np.ones((8, 1))
            >>> loss, norm = trainer.run(["loss", "gradient_norm"], x, y)
            >>> bool(float(norm) > 0)
            True
        """
        names = flat_names(fetches, self.model)
        step = self._functions.fetch(names, update=update, training=training)
        classes = class_weight_table(class_weight, sample_weight)
        values = step(x, y, sample_weight, classes)
        return tree.pack_sequence_as(fetches, values) if not isinstance(fetches, str) else values[0]

    def verify(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
    ) -> Verification:
        """Compares the train step for dynamic sizes with the exact one, on one batch.

        It changes no variable; see `Function.verify`.

        Example:
            >>> import keras, numpy as np, trainstep as ts
            >>> model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
            >>> trainer = ts.Trainer(model, optimizer="adam", loss="mse")
            >>> trainer.verify(np.ones((5, 2)), np.ones((5, 1))).exact
            True
        """
        classes = class_weight_table(class_weight, sample_weight)
        return self._functions.step("train").verify(x, y, sample_weight, classes)

    def inspect(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
    ) -> Inspection:
        """Reports on one batch, layer by layer, without changing the model.

        The report has the ranges and norms of activations and gradients, the share of dead units,
        and the first place where a NaN or an infinity arises.

        Example:
            >>> import keras, numpy as np, trainstep as ts
            >>> model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
            >>> trainer = ts.Trainer(model, optimizer="sgd", loss="mse")
            >>> trainer.inspect([[1.0, float("nan")]], [[0.0]]).first_bad
            'the input `x`: 1 .. 1, 1 NaN'
        """
        classes = class_weight_table(class_weight, sample_weight)
        inspector, forward_and_backward, gradients_by_activation = self._functions.inspector()
        found = forward_and_backward(x, y, sample_weight, classes)
        activation_gradients = gradients_by_activation(
            zeros_for(found["calls"]), x, y, sample_weight, classes
        )
        return build_report(
            self.model, inspector.layers, found, activation_gradients, (x, y, sample_weight)
        )

    def _captured_objects(self) -> list[Any]:
        return self._recipe.used()

    def is_of_this_compilation(self) -> bool:
        """Whether this trainer still belongs to the current compilation of the model."""
        return self._recipe.tracker is self.model._loss_tracker

    # Settings and counters --------------------------------------------------------------------

    @property
    def optimizer(self) -> Any:
        """The optimizer. Setting `trainer.optimizer.learning_rate` takes effect at once."""
        return self._recipe.optimizer

    @property
    def metrics(self) -> list[Any]:
        """The metrics; the loss tracker is the first."""
        with self._recipe.installed():
            return list(self.model.metrics)

    def reset_metrics(self) -> None:
        """Resets all metrics."""
        self._recipe.reset_metrics()

    @property
    def clip_norm(self) -> float | None:
        """The limit of the gradients' global norm; a new one takes effect at the next step."""
        limit = self._recipe.clip_norm
        return None if limit is None else float(limit.value)

    @clip_norm.setter
    def clip_norm(self, limit: float | None) -> None:
        self._recipe.set_clip_norm(limit)

    @property
    def loss_weights(self) -> Any:
        """The weights of the outputs' losses; new ones take effect at the next step."""
        weights = self._recipe.loss_weights
        return weights and tree.map_structure(lambda v: float(v.value), weights)

    @loss_weights.setter
    def loss_weights(self, weights: Any) -> None:
        self._recipe.set_loss_weights(weights)

    @property
    def skipped(self) -> int:
        """The number of batches that were skipped as not finite; see `nan_policy`."""
        return self._functions.skipped()

    @property
    def ledger(self) -> Events:
        """Every trace of this trainer's steps, with its reason."""
        return self._functions.ledger()

    @property
    def trace_count(self) -> int:
        """The number of traces of this trainer's steps."""
        return self.ledger.traces

    def __repr__(self) -> str:
        return f"<trainstep.Trainer of {self.model.name}: {self.trace_count} traces>"
