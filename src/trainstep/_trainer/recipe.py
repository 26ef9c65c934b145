"""`Recipe`: the optimizer, loss and metrics of a trainer, and the values that may change.

`model.compile` makes a recipe, so it accepts everything that Keras accepts. The recipe then belongs
to the trainer: two trainers may train one model, each with its own recipe. While a step is traced
and while callbacks run, the recipe is installed on the model, because `compute_loss` and
`compute_metrics` read it from there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import keras
from keras import ops, tree

from trainstep import _engines
from trainstep._common.errors import ArgumentError
from trainstep._data.batch_checks import check_positive
from trainstep._function.inside.gradients import clip_by_global_norm
from trainstep._state.optimizer_slots import innermost
from trainstep._state.scopes import current_scope
from trainstep._trainer.metric_reset import MetricReset

# Two threads may train one model. One recipe at a time is installed, so that each block restores
# the attributes that it replaced.
_install_lock = threading.RLock()
_ATTRIBUTES = (
    "optimizer",
    "_compile_loss",
    "_compile_metrics",
    "_loss_tracker",
    "loss",
    "compiled",
)


class Recipe:
    """The compiled state of a model, with values that a user may change between steps.

    Attributes:
        reset_each_batch: A bool variable: whether every step resets the metrics first, or they
            accumulate over batches.
        clip_norm: A variable with the limit of the gradients' global norm, or None.
        loss_weights: Variables in the structure of the user's weights, or None.
    """

    def __init__(
        self,
        model: Any,
        arguments: dict[str, Any],
        *,
        clip_norm: float | None,
        accumulate: int,
    ) -> None:
        self.model = model
        given = {name: value for name, value in arguments.items() if value is not None}
        if given:
            if model.compiled:
                for name in ("optimizer", "loss"):
                    given.setdefault(name, getattr(model, name, None))
            model._compile_loss = model._compile_metrics = None  # `compile` would keep them
            model.compile(**given)
        elif not model.compiled:
            raise ArgumentError(
                "Trainer",
                "loss",
                "an optimizer and a loss, or a model that was compiled with Keras",
                f"{type(model).__name__} {model.name!r}, which was not compiled",
                "pass `optimizer=` and `loss=`, or call `model.compile` first",
            )
        if accumulate > 1:
            _set_accumulation(innermost(model.optimizer), accumulate)
        self._attributes = {name: getattr(model, name, None) for name in _ATTRIBUTES}
        self.reset_each_batch = keras.Variable(
            True, dtype="bool", trainable=False, name="reset_each_batch"
        )
        self._bool_tensors: dict[bool, Any] = {}  # faster to assign than Python bools
        self._metric_reset = MetricReset()
        self.clip_norm: Any = (
            None if clip_norm is None else _scalar_variable(clip_norm, "clip_norm")
        )
        self.loss_weights = _loss_weight_variables(model._compile_loss)

    @property
    def optimizer(self) -> Any:
        """The optimizer, wrapped in a loss-scaling one if the dtype policy needs it."""
        return self._attributes["optimizer"]

    @property
    def tracker(self) -> Any:
        """The metric of the loss; each compilation of a model makes a new one."""
        return self._attributes["_loss_tracker"]

    @property
    def takes_targets(self) -> bool:
        """Whether the loss needs targets; False if layers add the only losses."""
        return self._attributes["_compile_loss"] is not None

    @property
    def loss(self) -> Any:
        """The loss in the form that the user passed; None if there is none."""
        compiled = self._attributes["_compile_loss"]
        return None if compiled is None else compiled._user_loss

    @property
    def losses(self) -> int | None:
        """The number of outputs that have their own loss; None if one loss is for all."""
        given = self.loss
        if not isinstance(given, (list, tuple, dict)):
            return None
        return sum(each is not None for each in tree.flatten(given))

    def used(self) -> list[Any]:
        """Returns the objects that a step uses, for the search for captured values."""
        loss, metrics = self._attributes["_compile_loss"], self._attributes["_compile_metrics"]
        given = [loss and loss._user_loss]
        if metrics is not None:
            given += [metrics._user_metrics, metrics._user_weighted_metrics]
        return [self.model, self.optimizer, *tree.flatten(given)]

    def has_unbuilt(self) -> bool:
        """Whether a loss or metric still needs its first batch to be built."""
        parts = (self._attributes["_compile_loss"], self._attributes["_compile_metrics"])
        return any(part is not None and not part.built for part in parts)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Installs the recipe on the model inside the block."""
        limit, optimizer = self.clip_norm, innermost(self.optimizer)
        clip = {}
        if limit is not None:  # Keras clips here too: after unscaling and accumulation
            clip["_clip_gradients"] = lambda grads: clip_by_global_norm(
                type(optimizer)._clip_gradients(optimizer, grads), limit.value
            )
        with (
            _install_lock,
            _temporary_attributes(self.model, self._attributes),
            _temporary_attributes(optimizer, clip),
        ):
            yield

    def install(self) -> None:
        """Installs the recipe on the model for good, like `compile`: callbacks read it there."""
        vars(self.model).update(self._attributes)

    def reset_metrics_where(self, reset: Any, *, compiled: bool) -> None:
        """Resets metrics where `reset` is true.

        Args:
            reset: True, False, or a tensor.
            compiled: True for the metrics of the recipe, which are built after the outputs are
                known; False for those of the model and its layers, which a call of the model may
                update.
        """
        if reset is False:
            return
        loss = self._attributes["_compile_loss"]
        own = [self.tracker, self._attributes["_compile_metrics"], *(loss.metrics if loss else ())]
        ids = {id(metric) for metric in own}
        for metric in self.model.metrics:
            if (id(metric) in ids) is compiled:
                _reset_where(metric, reset)

    def reset_metrics(self) -> None:
        """Resets all metrics now."""
        with self.installed():
            if current_scope() is None and _engines.current().is_idle():
                self._metric_reset(self.model)
            else:  # inside a step, the reset becomes part of it
                self.model.reset_metrics()

    @property
    def scales(self) -> bool:
        """Whether the optimizer scales the loss, and expects gradients of the scaled loss."""
        optimizer = self.optimizer
        return optimizer is not innermost(optimizer) or bool(optimizer.loss_scale_factor)

    def unscaled(self, gradients: list[Any]) -> list[Any]:
        """Converts gradients of the scaled loss to gradients of the loss."""
        if not self.scales:
            return gradients
        scale = self.optimizer.scale_loss(ops.ones(()))
        return [gradient / scale for gradient in gradients]

    def set_reset_each_batch(self, reset: bool) -> None:
        """Sets whether every step resets the metrics first."""
        if reset not in self._bool_tensors:
            self._bool_tensors[reset] = ops.convert_to_tensor(reset, dtype="bool")
        self.reset_each_batch.assign(self._bool_tensors[reset])

    def set_clip_norm(self, limit: float | None) -> None:
        """Sets another limit."""
        if self.clip_norm is None or limit is None:
            raise ArgumentError(
                "Trainer",
                "clip_norm",
                "a number, in a Trainer that has a limit already",
                f"{limit!r} instead of {self.clip_norm and float(self.clip_norm.value)!r}",
                "make the Trainer with `clip_norm=float('inf')` to clip nothing at first",
            )
        check_positive("Trainer", clip_norm=limit)
        self.clip_norm.assign(limit)

    def set_loss_weights(self, weights: Any) -> None:
        """Sets other weights, in the structure of the first ones."""
        try:
            tree.assert_same_structure(self.loss_weights, weights)
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                "Trainer",
                "loss_weights",
                f"weights in the structure of the first ones, {self.loss_weights!r}",
                repr(weights),
                "make the Trainer with `loss_weights`, and set them in the same structure",
            ) from error
        pairs = zip(tree.flatten(self.loss_weights), tree.flatten(weights), strict=True)
        for variable, weight in pairs:
            variable.assign(weight)


def _reset_where(metric: Any, reset: Any) -> None:
    """Resets a metric where `reset`, True or a tensor, is true."""
    variables = list({id(v): v for v in metric.variables}.values())
    before = [v.value for v in variables]
    metric.reset_state()
    if reset is not True:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(ops.where(reset, variable.value, value))


@contextlib.contextmanager
def _temporary_attributes(owner: Any, attributes: dict[str, Any]) -> Iterator[None]:
    """Replaces attributes of an object inside the block."""
    own = vars(owner)  # not `setattr`: Keras would track the values as parts of the object
    before = {name: own[name] for name in attributes if name in own}
    try:
        own.update(attributes)
        yield
    finally:
        for name in attributes:
            own.pop(name, None)
        own.update(before)


def _set_accumulation(optimizer: Any, steps: int) -> None:
    if optimizer.gradient_accumulation_steps == steps:
        return
    if optimizer.built:
        raise ArgumentError(
            "Trainer",
            "accumulate",
            "an optimizer that is not built yet, so that it can add slots for the sums",
            f"{type(optimizer).__name__} with {len(optimizer.variables)} variables",
            f"make the optimizer with gradient_accumulation_steps={steps}",
        )
    optimizer.gradient_accumulation_steps = steps


def _loss_weight_variables(loss: Any) -> Any:
    """Replaces the numbers in Keras's loss by variables, and returns the variables."""
    if loss is None or loss._user_loss_weights is None:
        return None
    if loss.built:
        made = [_scalar_variable(one.loss_weights, "loss_weight") for one in loss._flat_losses]
        pairs = zip(loss._flat_losses, made, strict=True)
        loss._flat_losses = [one._replace(loss_weights=weight) for one, weight in pairs]
        return made
    made = tree.map_structure(lambda w: _scalar_variable(w, "loss_weight"), loss._user_loss_weights)
    loss._user_loss_weights = made
    return made


def _scalar_variable(number: Any, name: str) -> Any:
    """Returns a variable, so that every call of a step reads the current number."""
    if isinstance(number, keras.Variable):  # made by an earlier trainer of this model
        return number
    return keras.Variable(float(number), dtype="float32", trainable=False, name=name)


def check_model(model: Any) -> None:
    """Rejects a model that these steps cannot train."""
    if not isinstance(model, keras.Model):
        raise ArgumentError(
            "Trainer",
            "model",
            "a keras.Model",
            f"a {type(model).__name__}",
            "wrap layers in a `keras.Sequential`",
        )
    overridden = overridden_steps(model)
    if overridden:
        raise ArgumentError(
            "Trainer",
            "model",
            "a model that trains by `compute_loss` and `compute_metrics`",
            f"{type(model).__name__}, which overrides `{'`, `'.join(overridden)}`",
            "write that step as a `trainstep.function`, or override `compute_loss` instead",
        )


def overridden_steps(model: Any) -> list[str]:
    """Returns the names of Keras's steps that a model overrides, each for one engine."""
    steps = ("train_step", "test_step", "predict_step")
    return [name for name in steps if getattr(type(model), name) is not getattr(keras.Model, name)]
