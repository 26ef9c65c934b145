"""What a model is trained with: its optimizer, loss and metrics, and the values that may change.

A recipe is made by `model.compile`, so it takes all that Keras takes, and is then the trainer's
own: two trainers may train one model, each with its own. While a step of a trainer is traced, and
while callbacks run, the recipe is lent to the model, whose `compute_loss` and `compute_metrics`
look there.
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
from trainstep._trainer.metric_reset import Starting

# One recipe at a time is lent, so that each is given back to what was there before.
_lending = threading.RLock()
_PARTS = ("optimizer", "_compile_loss", "_compile_metrics", "_loss_tracker", "loss", "compiled")


class Recipe:
    """The compiled state of a model, with knobs.

    Attributes:
        fresh: A variable: whether metrics start anew at every batch, or run on.
        clip_norm: A variable with the limit of the gradients' global norm, or None.
        loss_weights: Variables, in the structure of the weights that were given, or None.
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
            _accumulate(innermost(model.optimizer), accumulate)
        self._parts = {name: getattr(model, name, None) for name in _PARTS}
        self.fresh = keras.Variable(True, dtype="bool", trainable=False, name="fresh")
        self._flags: dict[bool, Any] = {}  # tensors, which take less time to assign than numbers
        self._starting = Starting()
        self.clip_norm: Any = None if clip_norm is None else _value(clip_norm, "clip_norm")
        self.loss_weights = _weights(model._compile_loss)

    @property
    def optimizer(self) -> Any:
        """The optimizer; a loss-scaling one around it if the model's policy asks for it."""
        return self._parts["optimizer"]

    @property
    def tracker(self) -> Any:
        """The metric of the loss; each compilation of a model makes its own."""
        return self._parts["_loss_tracker"]

    @property
    def takes_targets(self) -> bool:
        """Whether there is a loss of targets, besides those that layers add."""
        return self._parts["_compile_loss"] is not None

    @property
    def loss(self) -> Any:
        """The loss as it was given: one, or a structure of them; None if there is none."""
        compiled = self._parts["_compile_loss"]
        return None if compiled is None else compiled._user_loss

    @property
    def losses(self) -> int | None:
        """How many outputs have a loss of their own; None if one loss is for all."""
        given = self.loss
        if not isinstance(given, (list, tuple, dict)):
            return None
        return sum(each is not None for each in tree.flatten(given))

    def used(self) -> list[Any]:
        """What was given to train with, for those who want to know what a step depends on."""
        loss, metrics = self._parts["_compile_loss"], self._parts["_compile_metrics"]
        given = [loss and loss._user_loss]
        if metrics is not None:
            given += [metrics._user_metrics, metrics._user_weighted_metrics]
        return [self.model, self.optimizer, *tree.flatten(given)]

    def unbuilt(self) -> bool:
        """Whether a loss or metric has yet to see its first batch to know what it is."""
        parts = (self._parts["_compile_loss"], self._parts["_compile_metrics"])
        return any(part is not None and not part.built for part in parts)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Lends the recipe to the model."""
        limit, optimizer = self.clip_norm, innermost(self.optimizer)
        clip = {}
        if limit is not None:  # where Keras clips: unscaled, accumulated gradients
            clip["_clip_gradients"] = lambda grads: clip_by_global_norm(
                type(optimizer)._clip_gradients(optimizer, grads), limit.value
            )
        with _lending, _replaced(self.model, self._parts), _replaced(optimizer, clip):
            yield

    def adopt(self) -> None:
        """Makes the recipe the model's, as `compile` would: callbacks look there."""
        vars(self.model).update(self._parts)

    def start_metrics(self, fresh: Any, *, compiled: bool) -> None:
        """Resets metrics where `fresh` (True, False, or a tensor) is true.

        Args:
            fresh: Whether to.
            compiled: Those of the recipe, which are built once the outputs are there; or those of
                the model and its layers, which may be updated before.
        """
        if fresh is False:
            return
        loss = self._parts["_compile_loss"]
        own = [self.tracker, self._parts["_compile_metrics"], *(loss.metrics if loss else ())]
        ids = {id(metric) for metric in own}
        for metric in self.model.metrics:
            if (id(metric) in ids) is compiled:
                _start(metric, fresh)

    def reset_metrics(self) -> None:
        """Sets all metrics to their start, now."""
        with self.lent():
            if current_scope() is None and _engines.current().is_idle():
                self._starting(self.model)
            else:  # in a step: it becomes part of it
                self.model.reset_metrics()

    @property
    def scales(self) -> bool:
        """Whether the optimizer wants the gradients of a loss that it has scaled."""
        optimizer = self.optimizer
        return optimizer is not innermost(optimizer) or bool(optimizer.loss_scale_factor)

    def unscaled(self, gradients: list[Any]) -> list[Any]:
        """Gradients of the loss as it is, of those of the loss that the optimizer scales."""
        if not self.scales:
            return gradients
        scale = self.optimizer.scale_loss(ops.ones(()))
        return [gradient / scale for gradient in gradients]

    def set_fresh(self, fresh: bool) -> None:
        """Lets metrics start anew at every batch from now on, or run on."""
        if fresh not in self._flags:
            self._flags[fresh] = ops.convert_to_tensor(fresh, dtype="bool")
        self.fresh.assign(self._flags[fresh])

    def set_clip_norm(self, limit: float | None) -> None:
        """Another limit, or none."""
        if self.clip_norm is None or limit is None:
            raise ArgumentError(
                "Trainer",
                "clip_norm",
                "a number, in a Trainer that was made with one",
                f"{limit!r} instead of {self.clip_norm and float(self.clip_norm.value)!r}",
                "make the Trainer with `clip_norm=float('inf')` to clip nothing at first",
            )
        check_positive("Trainer", clip_norm=limit)
        self.clip_norm.assign(limit)

    def set_loss_weights(self, weights: Any) -> None:
        """Other weights, in the structure of the first ones."""
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


def _start(metric: Any, fresh: Any) -> None:
    variables = list({id(v): v for v in metric.variables}.values())
    before = [v.value for v in variables]
    metric.reset_state()
    if fresh is not True:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(ops.where(fresh, variable.value, value))


@contextlib.contextmanager
def _replaced(owner: Any, attributes: dict[str, Any]) -> Iterator[None]:
    """Gives an object other attributes for a while, past what its class makes of setting them."""
    own = vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    try:
        own.update(attributes)
        yield
    finally:
        for name in attributes:
            own.pop(name, None)
        own.update(before)


def _accumulate(optimizer: Any, steps: int) -> None:
    if optimizer.gradient_accumulation_steps == steps:
        return
    if optimizer.built:
        raise ArgumentError(
            "Trainer",
            "accumulate",
            "an optimizer that is not built yet, so that it can make room for the sums",
            f"{type(optimizer).__name__} with {len(optimizer.variables)} variables",
            f"make the optimizer with gradient_accumulation_steps={steps}",
        )
    optimizer.gradient_accumulation_steps = steps


def _weights(loss: Any) -> Any:
    """Loss weights as variables, put in place of the numbers in Keras's loss."""
    if loss is None or loss._user_loss_weights is None:
        return None
    if loss.built:
        made = [_value(one.loss_weights, "loss_weight") for one in loss._flat_losses]
        pairs = zip(loss._flat_losses, made, strict=True)
        loss._flat_losses = [one._replace(loss_weights=weight) for one, weight in pairs]
        return made
    made = tree.map_structure(lambda w: _value(w, "loss_weight"), loss._user_loss_weights)
    loss._user_loss_weights = made
    return made


def _value(number: Any, name: str) -> Any:
    """A number that a step reads anew at every call."""
    if isinstance(number, keras.Variable):  # of an earlier trainer of this model
        return number
    return keras.Variable(float(number), dtype="float32", trainable=False, name=name)


def check_model(model: Any) -> None:
    """Refuses what cannot be trained by these steps."""
    if not isinstance(model, keras.Model):
        raise ArgumentError(
            "Trainer",
            "model",
            "a keras.Model",
            f"a {type(model).__name__}",
            "wrap layers in a `keras.Sequential`",
        )
    own = own_steps(model)
    if own:
        raise ArgumentError(
            "Trainer",
            "model",
            "a model that trains by `compute_loss` and `compute_metrics`",
            f"{type(model).__name__}, whose `{'`, `'.join(own)}` is its own, for one engine",
            "write that step as a `trainstep.function`, or override `compute_loss` instead",
        )


def own_steps(model: Any) -> list[str]:
    """The steps that a model defines itself, each for one engine."""
    steps = ("train_step", "test_step", "predict_step")
    return [name for name in steps if getattr(type(model), name) is not getattr(keras.Model, name)]
